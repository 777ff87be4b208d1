// Where fibers meet: warp collectives, barriers, atomics, and the shared memory between them.
#include "emulator/collectives.h"

#include <algorithm>
#include <cstring>
#include <iterator>

#include "emulator/machine.h"

namespace specdec::emulator {

namespace {

// For threads that have met: each has waited for the loads of the others.
template <class ForEach>
void wait_for_loads(ForEach for_each) {
  if (!counting) return;
  int64_t most = 0;
  for_each([&](Fiber& fiber) { most = std::max(most, fiber.rounds); });
  for_each([&](Fiber& fiber) {
    fiber.rounds = most;
    fiber.loads = false;
  });
}

template <class F>
void for_each_fiber(Block& block, F f) {
  for (int i = 0; i < block.threads; ++i) f(block.fibers[i]);
}

}  // namespace

// ---- collectives

uint64_t meet(unsigned mask, Collective kind, Resolve resolve, uint64_t value, int argument, Site site) {
  Fiber& self = *current;
  Warp& warp = *self.warp;
  const unsigned bit = 1u << self.lane;
  if (!(mask & bit)) fail("warp collective", site, "lane " + std::to_string(self.lane) + " is not in its own mask");
  if (mask & warp.returned) fail("warp collective", site, "the mask names lanes that have returned");
  Meeting* meeting = nullptr;
  for (int i = 0; i < warp.num_meetings; ++i) {
    if (warp.meetings[i].mask == mask) meeting = &warp.meetings[i];
  }
  if (!meeting) {
    meeting = &warp.meetings[warp.num_meetings++];
    *meeting = {mask, 0, kind, site, warp.next_token++ % 64};
  } else if (meeting->kind != kind || meeting->site.line != site.line) {
    fail("warp collective", site, "other lanes of the mask are in the collective at " + text(meeting->site));
  }
  Token& token = warp.tokens[meeting->token];
  if (kind == Collective::kSyncwarp) token.release();  // the others order no memory
  warp.value[self.lane] = value;
  warp.argument[self.lane] = argument;
  meeting->arrived |= bit;
  if (meeting->arrived == mask) {
    *meeting = warp.meetings[--warp.num_meetings];
    count(warp.collectives, 1);
    wait_for_loads([&](auto f) {
      for (unsigned rest = mask; rest; rest &= rest - 1) f(warp.block->fibers[warp.index * 32 + __builtin_ctz(rest)]);
    });
    resolve(warp, mask, site);
    // The last lane to arrive goes on, except in random schedules.
    const bool stay = machine.order != Order::kRandom;
    make_ready(warp, stay ? mask & ~bit : mask);
    if (!stay) give_way();
  } else {
    self.waits = Waits::kWarp;
    self.site = site;
    give_way();
  }
  self.waits = Waits::kNot;
  if (kind == Collective::kSyncwarp) token.acquire();
  return warp.result[self.lane];
}

void resolve_nothing(Warp&, unsigned, Site) {}

void resolve_shuffle(Warp& warp, unsigned mask, Site site) {
  for (unsigned rest = mask; rest; rest &= rest - 1) {
    const int lane = __builtin_ctz(rest), source = warp.argument[lane] < 0 ? lane : warp.argument[lane];
    if (!(mask >> source & 1)) {
      fail("shuffle", site,
           "lane " + std::to_string(lane) + " reads lane " + std::to_string(source) + ", which takes no part");
    }
    warp.result[lane] = warp.value[source];
  }
}

void resolve_ballot(Warp& warp, unsigned mask, Site) {
  unsigned votes = 0;
  for (unsigned rest = mask; rest; rest &= rest - 1)
    votes |= unsigned(warp.value[__builtin_ctz(rest)]) << __builtin_ctz(rest);
  for (unsigned rest = mask; rest; rest &= rest - 1) warp.result[__builtin_ctz(rest)] = votes;
}

void resolve_match(Warp& warp, unsigned mask, Site) {
  for (unsigned rest = mask; rest; rest &= rest - 1) {
    const int lane = __builtin_ctz(rest);
    unsigned same = 0;
    for (unsigned other = mask; other; other &= other - 1) {
      const int i = __builtin_ctz(other);
      same |= unsigned(warp.value[i] == warp.value[lane]) << i;
    }
    warp.result[lane] = same;
  }
}

bool block_barrier(const char* what, bool vote, Site site) {
  Fiber& self = *current;
  Block& block = *self.block;
  if (block.returned > 0) fail(what, site, "threads of the block have returned without it");
  if (block.waiting > 0 && block.site.line != site.line) {
    fail(what, site, "other threads of the block are at the barrier at " + text(block.site));
  }
  Token& token = block.barrier_tokens[self.barriers++ % 2];
  token.release();
  block.site = site;
  block.waiting_in = what;
  block.vote |= vote;
  if (++block.waiting == block.threads) {
    count(block.work.barriers, 1);
    if (counting) __atomic_store_n(&block.work.loads, false, __ATOMIC_RELAXED);
    wait_for_loads([&](auto f) { for_each_fiber(block, f); });
    block.last_vote = block.vote;
    block.vote = false;
    block.waiting = 0;
    for (size_t w = 0; w < size_t(block.threads + 31) / 32; ++w) make_ready(block.warps[w], ~block.warps[w].returned);
    if (machine.order != Order::kRandom) {  // the last to arrive goes on
      self.warp->ready &= ~(1u << self.lane);
      if (!self.warp->ready) block.ready &= ~(1u << self.warp->index);
    } else {
      give_way();
    }
  } else {
    self.waits = Waits::kBlock;
    self.site = site;
    give_way();
  }
  self.waits = Waits::kNot;
  token.acquire();
  return block.last_vote;
}

void count_load(size_t bytes) {
  if (!counting) return;
  Work& work = current->block->work;
  count(work.bytes, int64_t(bytes));
  if (!__atomic_exchange_n(&work.loads, true, __ATOMIC_RELAXED)) count(work.loading, 1);
  Fiber& self = *current;
  if (self.loads) return;
  self.loads = true;
  work.rounds = std::max(work.rounds, ++self.rounds);
}

void cluster_barrier(Site site) {
  Fiber& self = *current;
  Cluster& cluster = *self.block->cluster;
  if (cluster.returned > 0) fail("cluster_sync", site, "threads of the cluster have returned without it");
  if (cluster.waiting > 0 && cluster.site.line != site.line) {
    fail("cluster_sync", site, "other threads of the cluster are at " + text(cluster.site));
  }
  Token& token = cluster.tokens[self.cluster_barriers++ % 2];
  token.release();
  cluster.site = site;
  self.waits = Waits::kCluster;
  self.site = site;
  if (++cluster.waiting == cluster.threads) {
    cluster.waiting = 0;
    wait_for_loads([&](auto f) {
      for (Block* block : cluster.blocks) for_each_fiber(*block, f);
    });
    for (Block* block : cluster.blocks) {
      count(block->work.cluster_barriers, 1);
      for (size_t w = 0; w < size_t(block->threads + 31) / 32; ++w)
        make_ready(block->warps[w], ~block->warps[w].returned);
    }
  }
  give_way();
  self.waits = Waits::kNot;
  token.acquire();
}

// ---- memory

// On the device an atomic orders nothing by itself. With a fence before it, it publishes what came before the fence; a
// fence after it sees what was published that way. TSan is told exactly that.
void atomic_point(void* address) {
  Machine& m = machine;
  Block& block = *current->block;
  const auto* const p = static_cast<unsigned char*>(address);
  const bool shared = p >= block.memory && p < block.memory + block.memory_bytes;
  count(shared ? block.work.shared_atomics : block.work.atomics, 1);
  if (m.order == Order::kRandom && m.next_random() % 4 == 0) {
    make_ready(*current->warp, 1u << current->lane);
    give_way();
  }
#ifdef SPECDEC_EMULATOR_TSAN
  if (current->fenced) __tsan_release(address);
#else
  (void)address;
#endif
}

void atomic_done(void* address) {
  if (!kTsan) return;
  current->fenced = false;
  saw_published(address);
}

void saw_published(void* address) {
  if (kTsan) current->published[current->num_published++ % std::size(current->published)] = address;
}

void fence() {
#ifdef SPECDEC_EMULATOR_TSAN
  const size_t count = std::min(current->num_published, std::size(current->published));
  for (size_t i = 0; i < count; ++i) __tsan_acquire(current->published[i]);
  current->num_published = 0;
  current->fenced = true;
#endif
}

void place_shared_array(SharedArray& array, size_t bytes, Site site) {
  Machine& m = machine;
  array.launch = current_launch;
  array.offset = m.arrays_end;
  m.arrays_bytes += round_up(bytes, 16);
  m.arrays_end += round_up(bytes, kRedzone) + kRedzone;
  if (m.num_arrays == kMostPlaced) fail("shared array", site, "the kernel has too many");
  m.arrays[m.num_arrays++] = {array.offset, bytes};
  if (m.arrays_bytes > kMostArrays || m.arrays_end > m.arrays_begin + kArraysRoom) {
    fail("shared array", site, "the arrays of the block are over " + std::to_string(kMostArrays) + " bytes");
  }
  if (m.arrays_bytes + m.grid.shared > size_t(kMostShared)) {
    fail("shared array", site, "shared memory of the block is over " + std::to_string(kMostShared) + " bytes");
  }
  for (Block* block : m.live) {
    permit(block->memory + array.offset, bytes);
    if (!kTsan) std::memset(block->memory + array.offset, 0xFF, bytes);  // else done: TSan would see a thread write
  }
}

bool is_shared(const void* address) {
  const auto* const p = static_cast<const unsigned char*>(address);
  for (const Block* block : current->block->cluster->blocks)
    if (p >= block->memory && p < block->memory + block->memory_bytes) return true;
  return false;
}

unsigned blocks_of_cluster() { return unsigned(current->block->cluster->blocks.size()); }

void* address_in_cluster_block(void* address, unsigned rank) {
  Block& block = *current->block;
  auto* p = static_cast<unsigned char*>(address);
  if (p < block.memory || p >= block.memory + block.memory_bytes)
    fail("in_cluster_block: not an address in shared memory");
  if (rank >= block.cluster->blocks.size()) fail("in_cluster_block: the cluster has no block " + std::to_string(rank));
  return block.cluster->blocks[rank]->memory + (p - block.memory);
}

}  // namespace specdec::emulator
