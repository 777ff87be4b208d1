// The machine that kernels run on: one fiber per CUDA thread, in warps, blocks and clusters. runtime.cpp schedules.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "emulator/context.h"
#include "emulator/sanitizers.h"
#include "emulator/types.h"

namespace specdec::emulator {

// A place in a kernel's source.
struct Site {
  const char* file;
  int line;
  static constexpr Site here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) { return {file, line}; }
};

[[noreturn]] void fail(const std::string& message);  // throws std::runtime_error
[[noreturn]] void fail(const char* what, Site site, const std::string& why);

struct Block;
struct Cluster;
struct Warp;

// What a block has done, while specdec_emulator_count is on. Threads add relaxed: TSan must see no order in it.
struct Work {
  int64_t bytes = 0;    // read by bulk copies and by named loads such as __ldg
  int64_t copied = 0;   // by bulk copies alone
  int64_t loading = 0;  // stretches between barriers with loads in them: no two can overlap
  int64_t rounds = 0;   // of loads, one after the other, on the longest path through the block: see Fiber
  int64_t barriers = 0, cluster_barriers = 0;
  int64_t atomics = 0, shared_atomics = 0;  // on device memory, on shared memory
  int64_t collectives = 0;                  // of the warp with the most
  bool loads = false;                       // there were any in the present stretch
};
__attribute__((visibility("hidden"))) inline bool counting = false;
inline void count(int64_t& number, int64_t more) {
  if (counting) __atomic_fetch_add(&number, more, __ATOMIC_RELAXED);
}

enum class Waits : uint8_t { kNot, kWarp, kBlock, kCluster, kMemory, kReturned };

// What a thread waits for: the end of a barrier's phase, or bits of a word.
struct Awaited {
  const uint64_t* barrier;
  unsigned parity;
  const unsigned* flags;
  unsigned bits;
};

struct Fiber {
  uint3 thread{};
  int lane = 0;
  Warp* warp = nullptr;
  Block* block = nullptr;
  Context context;
  Waits waits = Waits::kNot;
  Site site{"", 0};
  Awaited awaited{};
  // For the sanitizers.
  char* stack = nullptr;
  size_t stack_bytes = 0;
  void *fake_stack = nullptr, *tsan = nullptr;
  unsigned barriers = 0, cluster_barriers = 0;
  // Rounds of loads: all that a thread loads between two collectives or barriers is under way together, and all threads
  // that meet in one have waited as long as the last of them.
  int64_t rounds = 0;
  bool loads = false;   // it has loaded since it last met others
  bool fenced = false;  // a fence since the last atomic: the next one publishes what came before
  void* published[64];  // the last atomics since the last fence: the next fence takes over what they published
  size_t num_published = 0;
};

enum class Collective : uint8_t { kSyncwarp, kShuffle, kVote, kMatch, kReduce };

// Lanes on their way to one collective.
struct Meeting {
  unsigned mask, arrived;
  Collective kind;
  Site site;
  unsigned token;
};

struct Warp {
  unsigned ready = 0;     // lanes that can run
  unsigned returned = 0;  // lanes that have ended, or that the block does not have
  int index = 0, num_meetings = 0;
  unsigned priority = 0;
  unsigned next_token = 0;
  Block* block = nullptr;
  int64_t collectives = 0;
  uint64_t value[32], result[32];  // what a lane brings to the collective it is in, and takes away
  int argument[32];
  Meeting meetings[32];
  Token tokens[64];
};

// What has landed at a barrier.
struct Landing {
  const uint64_t* barrier = nullptr;
  int64_t rounds = 0;   // of loads until it has landed
  bool unseen = false;  // nobody has waited for the last of it yet
  Site site{"", 0};
};

struct Block {
  uint3 index{};
  dim3 dim, grid;
  unsigned rank = 0;  // in its cluster
  Cluster* cluster = nullptr;
  int threads = 0, returned = 0;
  unsigned ready = 0;  // warps that can run
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  // The barrier that is filling, whether any thread has voted for it, and whether any did for the last one.
  int waiting = 0;
  const char* waiting_in = "";
  Site site{"", 0};
  bool vote = false, last_vote = false;
  Token start, end, barrier_tokens[2];
  Work work;
  Landing landings[64];
  bool unpublished = false;  // an mbarrier, which copies may therefore not see yet
  // Shared memory: first the dynamic, then the arrays.
  unsigned char* memory = nullptr;
  size_t memory_bytes = 0;
  char* stacks = nullptr;  // of all fibers
  size_t stacks_bytes = 0;
  Block() = default;
  Block(const Block&) = delete;
  ~Block();
};

struct Cluster {
  std::vector<Block*> blocks;
  int threads = 0, returned = 0, waiting = 0;
  Site site{"", 0};
  Token tokens[2];
};

// The fiber that is running. Only one launch runs at a time, so a plain variable will do.
__attribute__((visibility("hidden"))) inline Fiber* current = nullptr;

// Brings `value` and `argument` to the lanes of `mask`; the last lane to arrive runs `resolve`, which fills
// warp.result. Returns the lane's result.
using Resolve = void (*)(Warp& warp, unsigned mask, Site site);
uint64_t meet(unsigned mask, Collective kind, Resolve resolve, uint64_t value, int argument, Site site);

void count_load(size_t bytes);  // by the current thread
// Returns whether any thread of the block voted.
bool block_barrier(const char* what, bool vote, Site site);
void cluster_barrier(Site site);
void atomic_point(void* address);  // an atomic is about to happen: others may come first
void atomic_done(void* address);
void saw_published(void* address);  // by the current thread, for its next fence to take over
void fence();
void wait_for_previous_kernel();

// An array in shared memory: its place in a block, determined anew in each launch.
struct SharedArray {
  uint64_t launch = 0;
  size_t offset = 0;
};
__attribute__((visibility("hidden"))) inline uint64_t current_launch = 0;
void place_shared_array(SharedArray& array, size_t bytes, Site site);

template <class Array>
Array& shared_array(SharedArray& array, Site site) {
  if (array.launch != current_launch) place_shared_array(array, sizeof(Array), site);
  return *reinterpret_cast<Array*>(current->block->memory + array.offset);
}

unsigned blocks_of_cluster();
void* address_in_cluster_block(void* address, unsigned rank);
bool is_shared(const void* address);  // of any block of the cluster

constexpr int kMostShared = 227 << 10;  // bytes of shared memory per block

struct Grid {
  dim3 grid, block;
  size_t shared;
  unsigned cluster;
  bool overlapping;
  const char* name;  // the launch's source text
};

// Runs body(arguments) in every thread of the grid. False if the device would refuse the launch; throws if a kernel
// does something wrong.
bool run_grid(const Grid& grid, void (*body)(const void*), const void* arguments);
void synchronize();  // later launches may not overlap what came before
int multiprocessors();

}  // namespace specdec::emulator
