// What goes on beside the threads: bulk copies into shared memory, the barriers that signal their end, and threads that
// wait for memory to change.
#include "emulator/transfers.h"

#include <algorithm>
#include <cstring>
#include <iterator>

#include "emulator/machine.h"

namespace specdec::emulator {

namespace {

// The layout of a barrier's 64 bits here; a device has its own.
struct Barrier {
  uint64_t phase : 1, arrivals : 15, missing : 15;
  int64_t bytes : 33;  // expected and not yet landed; negative if they landed first
};
static_assert(sizeof(Barrier) == sizeof(uint64_t));

void check_in_block(const void* address, size_t bytes, const char* what, Site site) {
  const Block& block = *current->block;
  const auto* const p = static_cast<const unsigned char*>(address);
  if (p < block.memory || p + bytes > block.memory + block.memory_bytes)
    fail(what, site, "not in the block's shared memory");
}

Barrier read(const uint64_t* word) {
  Barrier barrier;
  std::memcpy(&barrier, word, sizeof barrier);
  return barrier;
}

// Reads a barrier that a kernel names.
Barrier read_named(const uint64_t* word, Site site) {
  check_in_block(word, sizeof *word, "mbarrier", site);
  const Barrier barrier = read(word);
  if (barrier.arrivals == 0 || barrier.arrivals == 0x7FFF) fail("mbarrier", site, "it was not initialised");
  return barrier;
}

void write(Barrier barrier, uint64_t* word) {
  if (barrier.missing == 0 && barrier.bytes == 0) {
    barrier.phase ^= 1;
    barrier.missing = barrier.arrivals;
  }
  std::memcpy(word, &barrier, sizeof barrier);
}

#ifdef SPECDEC_EMULATOR_TSAN
// Copies as an agent of its own: it has seen what its starter had, and whoever waits for the barrier sees the copy.
void copy(const Copy& c) {
  void* const self = __tsan_get_current_fiber();
  __tsan_switch_to_fiber(machine.root, 1);  // as in run_grid
  void* const agent = __tsan_create_fiber(0);
  __tsan_switch_to_fiber(agent, 1);
  __tsan_acquire(c.to);
  std::memcpy(c.to, c.from, c.bytes);
  __tsan_release(c.barrier);
  __tsan_switch_to_fiber(self, 1);
  __tsan_destroy_fiber(agent);
}
#else
void copy(const Copy& c) { std::memcpy(c.to, c.from, c.bytes); }
#endif

Landing& landing_of(Block& block, const uint64_t* barrier, Site site) {
  Landing* const end = std::end(block.landings);
  Landing* const found =
      std::find_if(block.landings, end, [&](const Landing& l) { return !l.barrier || l.barrier == barrier; });
  if (found == end) fail("mbarrier", site, "the block has too many");
  found->barrier = barrier;
  return *found;
}

void land(size_t index) {
  Machine& m = machine;
  Copy& c = m.copies[index];
  copy(c);
  Barrier barrier = read(c.barrier);
  barrier.bytes -= c.bytes;
  write(barrier, c.barrier);
  Landing& landing = landing_of(*c.block, c.barrier, c.site);
  landing.rounds = std::max(landing.rounds, c.rounds);
  landing.unseen = true;
  landing.site = c.site;
  c = m.copies[--m.num_copies];
}

bool can_go_on(const Fiber& fiber) {
  const Awaited& a = fiber.awaited;
  if (a.barrier) return read(a.barrier).phase != a.parity;
  return (__atomic_load_n(a.flags, __ATOMIC_RELAXED) & a.bits) == a.bits;
}

bool wake() {
  Machine& m = machine;
  bool woken = false;
  for (size_t i = m.num_waiting; i-- > 0;) {
    Fiber& fiber = *m.waiting[i];
    if (!can_go_on(fiber)) continue;
    make_ready(*fiber.warp, 1u << fiber.lane);
    m.waiting[i] = m.waiting[--m.num_waiting];
    woken = true;
  }
  return woken;
}

void await(const Awaited& awaited, Site site) {
  Machine& m = machine;
  Fiber& self = *current;
  self.awaited = awaited;
  self.site = site;
  if (can_go_on(self)) return;
  if (m.num_waiting == std::size(m.waiting)) fail("wait", site, "too many threads wait");
  self.waits = Waits::kMemory;
  m.waiting[m.num_waiting++] = &self;
  give_way();
  self.waits = Waits::kNot;
}

}  // namespace

bool go_on_beside() {
  Machine& m = machine;
  if (wake()) return true;
  if (m.num_copies == 0) return false;
  // The copy started first lands first, or last, or any of them does.
  size_t chosen = m.order == Order::kRandom ? m.next_random() % m.num_copies : 0;
  for (size_t i = 1; i < m.num_copies && m.order != Order::kRandom; ++i)
    if ((m.copies[i].number < m.copies[chosen].number) == (m.order == Order::kForward)) chosen = i;
  land(chosen);
  wake();
  return true;
}

void check_ended(const Block& block) {
  const Machine& m = machine;
  constexpr const char* kWhy = "the block has ended without having waited for what it brings";
  for (size_t i = 0; i < m.num_copies; ++i)
    if (m.copies[i].block == &block) fail("bulk_copy", m.copies[i].site, kWhy);
  for (const Landing& landing : block.landings)
    if (landing.unseen) fail("bulk_copy", landing.site, kWhy);
}

void init_barrier(uint64_t* barrier, unsigned arrivals, Site site) {
  check_in_block(barrier, sizeof *barrier, "mbarrier", site);
  if (arrivals == 0 || arrivals >= 0x7FFF) fail("mbarrier", site, "a count that it cannot have");
  write({0, arrivals, arrivals, 0}, barrier);
  __atomic_store_n(&current->block->unpublished, true, __ATOMIC_RELAXED);
}

void publish_barriers() { __atomic_store_n(&current->block->unpublished, false, __ATOMIC_RELAXED); }

void expect_bytes(uint64_t* word, unsigned bytes, Site site) {
  Barrier barrier = read_named(word, site);
  if (barrier.missing == 0) fail("mbarrier", site, "more have come than its phase takes");
#ifdef SPECDEC_EMULATOR_TSAN
  __tsan_release(word);
#endif
  barrier.bytes += bytes;
  --barrier.missing;
  write(barrier, word);
}

void start_copy(void* to, const void* from, unsigned bytes, uint64_t* barrier, Site site) {
  Machine& m = machine;
  check_in_block(to, bytes, "bulk_copy", site);
  read_named(barrier, site);
  if (__atomic_load_n(&current->block->unpublished, __ATOMIC_RELAXED))
    fail("bulk_copy", site, "an mbarrier of the block was not published");
  landing_of(*current->block, barrier, site);
  if (bytes == 0 || ((reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from) | bytes) % 16) != 0)
    fail("bulk_copy", site, "addresses and bytes must be multiples of 16");
  if (m.num_copies == std::size(m.copies)) fail("bulk_copy", site, "too many copies are under way");
  Fiber& self = *current;
  Work& work = self.block->work;
  Copy& c = m.copies[m.num_copies++];
  c = {self.block, to, from, bytes, barrier, self.rounds + 1, m.started++, site};
#ifdef SPECDEC_EMULATOR_TSAN
  __tsan_release(to);
#endif
  count(work.bytes, bytes);
  count(work.copied, bytes);
  if (counting) {
    if (!__atomic_exchange_n(&work.loads, true, __ATOMIC_RELAXED)) count(work.loading, 1);
    work.rounds = std::max(work.rounds, c.rounds);
  }
}

void wait_for_barrier(uint64_t* barrier, unsigned parity, Site site) {
  read_named(barrier, site);
  await({barrier, parity, nullptr, 0}, site);
#ifdef SPECDEC_EMULATOR_TSAN
  __tsan_acquire(barrier);
#endif
  Fiber& self = *current;
  Landing& landing = landing_of(*self.block, barrier, site);
  landing.unseen = false;
  if (landing.rounds < self.rounds) return;
  self.rounds = landing.rounds;
  self.loads = false;
}

void wait_for_bits(unsigned* flags, unsigned bits, Site site) {
  count_load(sizeof *flags);
  await({nullptr, 0, flags, bits}, site);
  current->loads = false;
  saw_published(flags);
}

}  // namespace specdec::emulator
