// Which fiber runs next, and the launch of a grid.
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <stdexcept>

#include "emulator/machine.h"
#include "emulator/transfers.h"

#define SPECDEC_EXPORT extern "C" __attribute__((visibility("default")))

namespace specdec::emulator {

Machine machine;

namespace {

constexpr size_t kPage = 4096;
constexpr size_t kStack = kAsan ? 256 << 10 : 64 << 10;  // ASan's frames are larger
constexpr size_t kMostFibers = 6000;                     // for TSan, which has at most 8128
constexpr int kMostThreads = 1024;                       // a block
constexpr int kMostOverlapping = 4096;                   // threads of blocks that run at a time in random schedules

int random_bit(unsigned mask) {
  const unsigned turn = unsigned(machine.next_random()) % 32;
  const unsigned turned = mask >> turn | mask << (-turn & 31u);
  return int((unsigned(__builtin_ctz(turned)) + turn) % 32);
}

int choose_bit(unsigned mask) {
  switch (machine.order) {
    case Order::kForward:
      return __builtin_ctz(mask);
    case Order::kReverse:
      return 31 - __builtin_clz(mask);
    default:
      return random_bit(mask);
  }
}

// ---- switching

Warp* next_in_order() {
  const size_t n = machine.live.size();
  for (size_t i = 0; i < n; ++i) {
    Block* block = machine.live[machine.order == Order::kReverse ? n - 1 - i : i];
    if (block->ready) return &block->warps[choose_bit(block->ready)];
  }
  return nullptr;
}

// Any warp alike; or, in about half of the launches, by priorities that seldom change, so that some warps lag far behind.
Warp* next_at_random() {
  Machine& m = machine;
  const bool alike = m.launch_random % 2 == 0;
  Warp* chosen = nullptr;
  unsigned ready = 0;
  for (Block* block : m.live) {
    for (unsigned rest = block->ready; rest; rest &= rest - 1) {
      Warp* warp = &block->warps[__builtin_ctz(rest)];
      if (m.next_random() % 64 == 0) warp->priority = unsigned(m.next_random());
      ++ready;
      if (!chosen || (alike ? m.next_random() % ready == 0 : warp->priority > chosen->priority)) chosen = warp;
    }
  }
  return chosen;
}

// Takes the next fiber that is ready; null if none is.
Fiber* take_next() {
  Machine& m = machine;
  const bool random = m.order == Order::kRandom;
  const bool beside = m.num_copies + m.num_waiting > 0;
  // What goes on beside the threads waits until no thread can go on; in about half of the random launches not always.
  if (beside && random && m.launch_random / 2 % 2 == 0 && m.next_random() % 16 == 0) go_on_beside();
  if (!m.last || !m.last->ready || (random && m.next_random() % 16 == 0)) {
    do {
      m.last = random ? next_at_random() : next_in_order();
    } while (!m.last && beside && go_on_beside());
    if (!m.last) return nullptr;
  }
  Warp& warp = *m.last;
  const int lane = choose_bit(warp.ready);
  warp.ready &= ~(1u << lane);
  if (!warp.ready) warp.block->ready &= ~(1u << warp.index);
  return &warp.block->fibers[warp.index * 32 + lane];
}

__attribute__((noinline)) void switch_to(Fiber& to, bool dying) {
  Fiber& from = current ? *current : machine.host;
  current = &to == &machine.host ? nullptr : &to;
#ifdef SPECDEC_EMULATOR_ASAN
  __sanitizer_start_switch_fiber(dying ? nullptr : &from.fake_stack, to.stack, to.stack_bytes);
#else
  (void)dying;
#endif
#ifdef SPECDEC_EMULATOR_TSAN
  __tsan_switch_to_fiber(to.tsan, 1);  // 1: the switch itself orders nothing
#endif
  switch_context(from.context, to.context);
#ifdef SPECDEC_EMULATOR_ASAN
  __sanitizer_finish_switch_fiber(from.fake_stack, nullptr, nullptr);
#endif
}

void return_of(Fiber& fiber) {
  Warp& warp = *fiber.warp;
  Block& block = *fiber.block;
  const unsigned bit = 1u << fiber.lane;
  fiber.waits = Waits::kReturned;
  warp.returned |= bit;
  ++block.returned;
  ++block.cluster->returned;
  for (int i = 0; i < warp.num_meetings; ++i) {
    if (warp.meetings[i].mask & bit)
      fail("warp collective", warp.meetings[i].site, "a lane that its mask names has returned");
  }
  if (block.waiting > 0) fail(block.waiting_in, block.site, "a thread of the block has returned without it");
  if (block.cluster->waiting > 0) fail("cluster_sync", block.cluster->site, "a thread has returned without it");
  if (block.returned == block.threads) {  // its shared memory ends with it, for the rest of the cluster too
    check_ended(block);
    permit(block.memory, block.memory_bytes);
    if (!kTsan) std::memset(block.memory, 0xFF, machine.arrays_end);
    forbid(block.memory, block.memory_bytes);
  }
}

void fiber_main() {
  Machine& m = machine;
#ifdef SPECDEC_EMULATOR_ASAN
  const void* stack = nullptr;
  size_t bytes = 0;
  __sanitizer_finish_switch_fiber(nullptr, &stack, &bytes);
  if (!m.host.stack) {  // the first fiber comes from the host
    m.host.stack = static_cast<char*>(const_cast<void*>(stack));
    m.host.stack_bytes = bytes;
  }
#endif
  Fiber& self = *current;
  self.block->start.acquire();
  try {
    m.body(m.arguments);
    m.end_tokens[m.launches % 2].release();
    self.block->end.release();
    return_of(self);
  } catch (...) {
    m.error = std::current_exception();
  }
  Cluster& cluster = *self.block->cluster;
  Fiber* next = m.error || cluster.returned == cluster.threads ? nullptr : take_next();
  switch_to(next ? *next : m.host, true);
  __builtin_unreachable();
}

// ---- blocks

void prepare_memory(Block& block) {
  const Machine& m = machine;
  const size_t bytes = m.arrays_begin + kArraysRoom;
  if (block.memory_bytes < bytes) {
    std::free(block.memory);
    block.memory = static_cast<unsigned char*>(std::aligned_alloc(kRedzone, bytes));
    if (!block.memory) throw std::bad_alloc();
    block.memory_bytes = bytes;
  }
  // Uninitialised on the device; here NaN, or -1, or the largest unsigned number, so that reading it shows.
  permit(block.memory, block.memory_bytes);
  std::memset(block.memory, 0xFF, kTsan ? block.memory_bytes : m.arrays_end);
  forbid(block.memory, block.memory_bytes);
  permit(block.memory, m.grid.shared);
  for (size_t i = 0; i < m.num_arrays; ++i) permit(block.memory + m.arrays[i].offset, m.arrays[i].bytes);
}

void prepare_stacks(Block& block) {
  const size_t stride = kStack + kPage, bytes = stride * size_t(block.threads);
  if (block.stacks_bytes < bytes) {
    if (block.stacks) munmap(block.stacks, block.stacks_bytes);
    block.stacks_bytes = 0;
    void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) throw std::bad_alloc();
    block.stacks = static_cast<char*>(p);
    block.stacks_bytes = bytes;
    for (size_t i = 0; i < bytes; i += stride) mprotect(block.stacks + i, kPage, PROT_NONE);
  }
  for (int i = 0; i < block.threads; ++i) {
    Fiber& fiber = block.fibers[i];
    // Stacks begin at different cache sets, as the fibers of a warp constantly take turns.
    fiber.stack = block.stacks + stride * size_t(i) + kPage;
    fiber.stack_bytes = kStack - size_t(i) * 7 % 64 * 64;
    make_context(fiber.context, fiber.stack, fiber.stack_bytes, fiber_main);
  }
}

void start_block(Block& block, uint3 index, Cluster& cluster) {
  const Machine& m = machine;
  block.index = index;
  block.dim = m.grid.block;
  block.grid = m.grid.grid;
  block.cluster = &cluster;
  block.rank = unsigned(cluster.blocks.size());
  block.threads = int(block.dim.x * block.dim.y * block.dim.z);
  block.work = {};
  std::fill(std::begin(block.landings), std::end(block.landings), Landing{});
  block.unpublished = false;
  block.returned = block.waiting = 0;
  block.ready = 0;
  block.vote = false;
  const size_t warps = size_t(block.threads + 31) / 32;
  if (block.fibers.size() < size_t(block.threads)) block.fibers.resize(block.threads);
  if (block.warps.size() < warps) block.warps.resize(warps);
  prepare_memory(block);
  prepare_stacks(block);
  for (int w = 0; w < int(warps); ++w) {
    Warp& warp = block.warps[w];
    const int lanes = std::min(32, block.threads - w * 32);
    warp.index = w;
    warp.block = &block;
    warp.num_meetings = 0;
    warp.collectives = 0;
    warp.priority = unsigned(machine.next_random());
    warp.ready = 0;
    warp.returned = lanes == 32 ? 0 : ~0u << lanes;
    make_ready(warp, ~warp.returned);
  }
  for (int i = 0; i < block.threads; ++i) {
    Fiber& fiber = block.fibers[i];
    fiber.thread = {unsigned(i) % block.dim.x, unsigned(i) / block.dim.x % block.dim.y,
                    unsigned(i) / (block.dim.x * block.dim.y)};
    fiber.lane = i % 32;
    fiber.warp = &block.warps[i / 32];
    fiber.block = &block;
    fiber.waits = Waits::kNot;
    fiber.barriers = fiber.cluster_barriers = 0;
    fiber.rounds = 0;
    fiber.loads = false;
    fiber.fenced = false;
    fiber.num_published = 0;
#ifdef SPECDEC_EMULATOR_TSAN
    if (!fiber.tsan) {
      fiber.tsan = __tsan_create_fiber(0);
      ++machine.num_fibers;
    }
#endif
  }
  block.start.release();
  cluster.blocks.push_back(&block);
  cluster.threads += block.threads;
}

std::unique_ptr<Block> take_block() {
  Machine& m = machine;
  auto& pool = m.pool();
  const size_t threads = size_t(m.grid.block.x) * m.grid.block.y * m.grid.block.z;
  const size_t has = pool.empty() ? 0 : pool.back()->fibers.size();
  if (kTsan && !m.ended.empty() && has < threads && m.num_fibers + threads - has > kMostFibers) {
    std::unique_ptr<Block> block = std::move(m.ended.front());
    m.ended.erase(m.ended.begin());
    block->end.acquire();  // the launch now counts as after that block: races with it go unseen
    return block;
  }
  if (pool.empty()) return std::make_unique<Block>();
  std::unique_ptr<Block> block = std::move(pool.back());
  pool.pop_back();
  return block;
}

// Blocks of one cluster, from `first` along x.
void start_cluster(uint3 first) {
  Machine& m = machine;
  Cluster& cluster = *m.clusters.emplace_back(std::make_unique<Cluster>());
  for (unsigned i = 0; i < m.grid.cluster; ++i) {
    std::unique_ptr<Block> block = take_block();
    m.live.push_back(block.get());
    m.blocks.push_back(std::move(block));
    start_block(*m.live.back(), {first.x + i, first.y, first.z}, cluster);
  }
}

void end_block(Block& block) {
  Machine& m = machine;
  if (counting) m.counts.back().add(block);
  for (int i = 0; i < block.threads; ++i) {
    Fiber& fiber = block.fibers[i];
    // The part of its stack that a fiber leaves poisoned: all frames if it was given up, else only those that end it.
    const size_t used = fiber.waits == Waits::kReturned ? 2 * kPage : fiber.stack_bytes;
    permit(fiber.stack + fiber.stack_bytes - used, used);
  }
  m.live.erase(std::find(m.live.begin(), m.live.end(), &block));
  const auto owner = std::find_if(m.blocks.begin(), m.blocks.end(), [&](auto& b) { return b.get() == &block; });
  (kTsan ? m.ended : m.pool()).push_back(std::move(*owner));
  m.blocks.erase(owner);
}

void end_cluster(Cluster& cluster) {
  Machine& m = machine;
  m.last = nullptr;
  for (Block* block : cluster.blocks) end_block(*block);
  m.clusters.erase(std::find_if(m.clusters.begin(), m.clusters.end(), [&](auto& c) { return c.get() == &cluster; }));
}

[[noreturn]] void fail_deadlock() {
  const char* names[] = {"",        "in a warp collective", "at a barrier", "in cluster_sync", "in a wait for memory",
                         "returned"};
  constexpr int kReturned = int(Waits::kReturned);
  int count[kReturned + 1] = {};
  Site site[kReturned + 1];
  for (const Block* block : machine.live) {
    for (int i = 0; i < block->threads; ++i) {
      ++count[int(block->fibers[i].waits)];
      site[int(block->fibers[i].waits)] = block->fibers[i].site;
    }
  }
  std::string message = "deadlock:";
  for (int i = 1; i <= kReturned; ++i) {
    if (count[i] == 0) continue;
    message += (message.back() == ':' ? " " : ", ") + std::to_string(count[i]) + " threads " + names[i];
    if (i < kReturned) message += " (" + text(site[i]) + ")";
  }
  fail(message);
}

void run_all(std::vector<uint3>& firsts) {
  Machine& m = machine;
  const int threads = int(m.grid.block.x * m.grid.block.y * m.grid.block.z * m.grid.cluster);
  size_t next = 0;
  while (next < firsts.size() || !m.clusters.empty()) {
    // Unless told otherwise, up to three clusters run at a time in random schedules, and one in the others.
    const size_t by_order = m.order == Order::kRandom && 3 * threads <= kMostOverlapping ? 1 + m.next_random() % 3 : 1;
    const size_t at_once = m.resident > 0 ? size_t(m.resident) : by_order;
    while (next < firsts.size() && m.clusters.size() < at_once) start_cluster(firsts[next++]);
    Fiber* fiber = take_next();
    if (!fiber) fail_deadlock();
    switch_to(*fiber, false);
    if (m.error) std::rethrow_exception(m.error);
    for (size_t i = m.clusters.size(); i-- > 0;) {
      if (m.clusters[i]->returned == m.clusters[i]->threads) end_cluster(*m.clusters[i]);
    }
  }
}

bool accepted(const Grid& g) {
  const uint64_t threads = uint64_t(g.block.x) * g.block.y * g.block.z;
  return threads >= 1 && threads <= kMostThreads && g.block.z <= 64 && g.grid.x >= 1 && g.grid.x <= 0x7FFFFFFFu &&
         g.grid.y >= 1 && g.grid.y <= 65535 && g.grid.z >= 1 && g.grid.z <= 65535 && g.cluster >= 1 && g.cluster <= 8 &&
         g.grid.x % g.cluster == 0 && g.shared <= size_t(kMostShared);
}

}  // namespace

void give_way() {
  Fiber* next = take_next();
  if (next == current) return;
  switch_to(next ? *next : machine.host, false);
}

Block::~Block() {
#ifdef SPECDEC_EMULATOR_TSAN
  for (Fiber& fiber : fibers) {
    if (!fiber.tsan) continue;
    __tsan_destroy_fiber(fiber.tsan);
    --machine.num_fibers;
  }
#endif
  permit(memory, memory_bytes);
  std::free(memory);
  if (stacks) munmap(stacks, stacks_bytes);
}

std::string text(Site site) {
  const char* slash = std::strrchr(site.file, '/');
  return std::string(slash ? slash + 1 : site.file) + ":" + std::to_string(site.line);
}

void fail(const std::string& message) { throw std::runtime_error("emulator: " + message); }

void fail(const char* what, Site site, const std::string& why) {
  fail(std::string(what) + " at " + text(site) + ": " + why);
}

// ---- launches

void wait_for_previous_kernel() {
  Machine& m = machine;
  if (m.has_previous) m.end_tokens[(m.launches + 1) % 2].acquire();
}

void Counted::add(const Block& block) {
  const Work& work = block.work;
  int64_t collectives = 0;
  for (size_t w = 0; w < size_t(block.threads + 31) / 32; ++w)
    collectives = std::max(collectives, block.warps[w].collectives);
  bytes += work.bytes;
  atomics += work.atomics;
  shared_atomics += work.shared_atomics;
  most_bytes = std::max(most_bytes, work.bytes);
  most_copied = std::max(most_copied, work.copied);
  loading = std::max(loading, work.loading);
  rounds = std::max(rounds, work.rounds);
  barriers = std::max(barriers, work.barriers);
  cluster_barriers = std::max(cluster_barriers, work.cluster_barriers);
  most_collectives = std::max(most_collectives, collectives);
}

bool run_grid(const Grid& grid, void (*body)(const void*), const void* arguments) {
  if (!accepted(grid)) return false;
  Machine& m = machine;
  const std::lock_guard<std::mutex> lock(m.mutex);
  ++m.launches;
  ++current_launch;
  if (counting) m.counts.push_back({grid});
  m.grid = grid;
  m.body = body;
  m.arguments = arguments;
  m.error = nullptr;
  m.last = nullptr;
  m.random = (m.seed + 1) * 0x9E3779B97F4A7C15ull ^ uint64_t(m.launches) << 32 ^ uint64_t(m.launches);
  m.launch_random = m.next_random();
  m.num_arrays = m.num_copies = m.num_waiting = 0;
  m.arrays_begin = m.arrays_end = round_up(grid.shared, kRedzone) + kRedzone;
  m.arrays_bytes = 0;
  m.host.stack = nullptr;

  std::vector<uint3> firsts;
  for (unsigned z = 0; z < grid.grid.z; ++z) {
    for (unsigned y = 0; y < grid.grid.y; ++y) {
      for (unsigned x = 0; x < grid.grid.x; x += grid.cluster) firsts.push_back({x, y, z});
    }
  }
  if (m.order == Order::kReverse) std::reverse(firsts.begin(), firsts.end());
  if (m.order == Order::kRandom) {
    for (size_t i = firsts.size(); i > 1; --i) std::swap(firsts[i - 1], firsts[m.next_random() % i]);
  }

  // Blocks are started by `front`. If the launch may overlap the previous kernel, `front` has not seen what the host
  // has: until wait_for_previous it knows only what the host knew at that kernel's launch. (That includes the end of the
  // kernel before it, which on a GPU may still run if that kernel lets the next one start early: such races go unseen.)
#ifdef SPECDEC_EMULATOR_TSAN
  m.host_tokens[m.launches % 2].release();
  void* const host = __tsan_get_current_fiber();
  if (!m.root) m.root = __tsan_create_fiber(0);
  __tsan_switch_to_fiber(m.root, 1);  // a new fiber inherits what its creator has seen: root has seen nothing since
  void* const front = m.host.tsan = __tsan_create_fiber(0);
  __tsan_switch_to_fiber(front, 1);
  m.front_token.acquire();
  m.host_tokens[(m.launches + (grid.overlapping && m.has_previous ? 1 : 0)) % 2].acquire();
#endif
  std::exception_ptr error;
  try {
    run_all(firsts);
  } catch (...) {
    error = std::current_exception();
    m.error = nullptr;
  }
  while (!m.clusters.empty()) end_cluster(*m.clusters.back());
  // After a kernel has failed, fibers were given up midway: TSan could not use them again.
  if (!error) std::move(m.ended.begin(), m.ended.end(), std::back_inserter(m.pool()));
  m.ended.clear();
#ifdef SPECDEC_EMULATOR_TSAN
  m.front_token.release();
  __tsan_switch_to_fiber(host, 1);
  __tsan_destroy_fiber(front);
  m.front_token.acquire();
  m.end_tokens[m.launches % 2].acquire();
#endif
  m.has_previous = true;
  if (error) std::rethrow_exception(error);
  return true;
}

void synchronize() {
  const std::lock_guard<std::mutex> lock(machine.mutex);
  machine.has_previous = false;
}

int multiprocessors() { return machine.multiprocessors; }

}  // namespace specdec::emulator

// Order of threads, warps and blocks in every later launch: 0 forward, 1 reverse, 2 random from `seed`.
SPECDEC_EXPORT void specdec_emulator_schedule(int order, uint64_t seed) {
  auto& m = specdec::emulator::machine;
  const std::lock_guard<std::mutex> lock(m.mutex);
  m.order = specdec::emulator::Order(order);
  m.seed = seed;
  m.launches = 0;
  m.has_previous = false;
}

// Multiprocessors that the device claims to have; 8 unless set.
SPECDEC_EXPORT void specdec_emulator_multiprocessors(int count) { specdec::emulator::machine.multiprocessors = count; }

// Clusters (or blocks) that the device runs at a time; 0: one, and in random schedules up to three.
SPECDEC_EXPORT void specdec_emulator_resident(int count) { specdec::emulator::machine.resident = count; }

// Kernels launched since the schedule was set.
SPECDEC_EXPORT int64_t specdec_emulator_launches() { return specdec::emulator::machine.launches; }

// Whether to count what launches do from here on; forgets what was counted before.
SPECDEC_EXPORT void specdec_emulator_count(int on) {
  auto& m = specdec::emulator::machine;
  const std::lock_guard<std::mutex> lock(m.mutex);
  m.counts.clear();
  specdec::emulator::counting = on != 0;
}

// The source text of counted launch `index`, and its numbers (see Counted); null past the last one.
SPECDEC_EXPORT const char* specdec_emulator_counted(int64_t index, int64_t* numbers) {
  const auto& counts = specdec::emulator::machine.counts;
  if (index < 0 || size_t(index) >= counts.size()) return nullptr;
  const auto& c = counts[size_t(index)];
  const auto volume = [](dim3 d) { return int64_t(d.x) * d.y * d.z; };
  const int64_t all[] = {volume(c.grid.grid),
                         volume(c.grid.block),
                         c.grid.cluster,
                         c.grid.overlapping,
                         c.bytes,
                         c.most_bytes,
                         c.loading,
                         c.barriers,
                         c.cluster_barriers,
                         c.atomics,
                         c.most_collectives,
                         c.shared_atomics,
                         c.rounds,
                         c.most_copied};
  std::copy(std::begin(all), std::end(all), numbers);
  return c.grid.name;
}
