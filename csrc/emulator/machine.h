// The scheduler's own state, which kernels do not see.
#pragma once
#include <algorithm>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "emulator/runtime.h"

namespace specdec::emulator {

constexpr size_t kRedzone = 128;
constexpr size_t kMostArrays = 48 << 10;         // bytes of shared arrays per block, as nvcc allows
constexpr size_t kArraysRoom = 2 * kMostArrays;  // with their redzones

enum class Order { kForward, kReverse, kRandom };

constexpr size_t kMostPlaced = 64;  // shared arrays per kernel

struct Placed {
  size_t offset, bytes;
};

// A bulk copy on its way.
struct Copy {
  Block* block;
  void* to;
  const void* from;
  unsigned bytes;
  uint64_t* barrier;
  int64_t rounds, number;  // rounds: loads until it has landed; number: in the order of the starts
  Site site;
};

// What a launch did: all blocks together, or the block that did most.
struct Counted {
  Grid grid;
  int64_t bytes = 0, atomics = 0, shared_atomics = 0;
  int64_t most_bytes = 0, most_copied = 0, loading = 0, rounds = 0, barriers = 0, cluster_barriers = 0,
          most_collectives = 0;
  void add(const Block& block);
};

// What one launch needs, and what outlives a launch.
struct Machine {
  std::mutex mutex;  // one launch at a time
  Order order = Order::kForward;
  uint64_t seed = 0, random = 0, launch_random = 0;
  int64_t launches = 0;
  int multiprocessors = 8;
  int resident = 0;           // clusters that run at a time; 0: as the order says
  bool has_previous = false;  // there is a kernel that the next launch may overlap
  Token host_tokens[2], end_tokens[2], front_token;
  void* root = nullptr;   // TSan: creates the fiber that starts blocks, see run_grid
  size_t num_fibers = 0;  // that TSan knows of

  Fiber host;
  Grid grid{};
  void (*body)(const void*) = nullptr;
  const void* arguments = nullptr;
  std::exception_ptr error;
  Warp* last = nullptr;  // the last warp to run, which goes on while it can
  std::vector<Block*> live;
  std::vector<std::unique_ptr<Cluster>> clusters;
  std::vector<std::unique_ptr<Block>> blocks, ended, idle[2];  // running; of this launch; to be used again
  // No vectors: fibers fill these, and TSan would watch what they allocate.
  Placed arrays[kMostPlaced];
  Copy copies[4096];
  Fiber* waiting[8192];  // for memory to change
  size_t num_arrays = 0, num_copies = 0, num_waiting = 0;
  int64_t started = 0;          // copies
  std::vector<Counted> counts;  // of launches, while they are counted
  size_t arrays_begin = 0, arrays_end = 0, arrays_bytes = 0;

  // TSan remembers which fiber touched what, so blocks of a launch and of one that may overlap it share nothing.
  std::vector<std::unique_ptr<Block>>& pool() { return idle[kTsan ? launches % 2 : 0]; }

  uint64_t next_random() {  // xorshift64*
    random ^= random >> 12;
    random ^= random << 25;
    random ^= random >> 27;
    return random * 0x2545F4914F6CDD1Dull >> 32;
  }
};

extern Machine machine;

std::string text(Site site);

inline size_t round_up(size_t n, size_t multiple) { return (n + multiple - 1) / multiple * multiple; }

inline void make_ready(Warp& warp, unsigned lanes) {
  warp.ready |= lanes;
  if (warp.ready) warp.block->ready |= 1u << warp.index;
}

void give_way();  // the current fiber waits until it is made ready

}  // namespace specdec::emulator
