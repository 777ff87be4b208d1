// Barriers, shuffles, votes and reductions, by CUDA's names.
#pragma once
#include <cstring>
#include <type_traits>

#include "emulator/runtime.h"

namespace specdec::emulator {

template <class T>
uint64_t to_bits(T value) {
  static_assert(std::is_arithmetic_v<T> && (sizeof(T) == 4 || sizeof(T) == 8), "CUDA has it for 4 and 8 bytes only");
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  return bits;
}

template <class T>
T from_bits(uint64_t bits) {
  T value;
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}

constexpr int kOwnValue = -1;  // a shuffle's source beyond the segment: the lane keeps what it has

void resolve_shuffle(Warp& warp, unsigned mask, Site site);
void resolve_ballot(Warp& warp, unsigned mask, Site site);
void resolve_match(Warp& warp, unsigned mask, Site site);
void resolve_nothing(Warp& warp, unsigned mask, Site site);

// The other resolvers are in collectives.cpp, which TSan does not watch. It must not watch this one either, although it
// is compiled with a kernel: it works in one lane for all of them.
template <class T, class Op>
[[gnu::no_sanitize("thread")]] void resolve_reduce(Warp& warp, unsigned mask, Site) {
  T total{};
  bool first = true;
  for (unsigned rest = mask; rest; rest &= rest - 1) {
    const T value = from_bits<T>(warp.value[__builtin_ctz(rest)]);
    total = first ? value : Op{}(total, value);
    first = false;
  }
  for (unsigned rest = mask; rest; rest &= rest - 1) warp.result[__builtin_ctz(rest)] = to_bits(total);
}

template <class T>
T shuffle(unsigned mask, T value, int source, Site site) {
  return from_bits<T>(meet(mask, Collective::kShuffle, resolve_shuffle, to_bits(value), source, site));
}

inline unsigned ballot(unsigned mask, bool vote, Site site) {
  return unsigned(meet(mask, Collective::kVote, resolve_ballot, vote, 0, site));
}

template <class Op, class T>
T reduce(unsigned mask, T value, Site site) {
  static_assert(std::is_integral_v<T> && sizeof(T) == 4, "CUDA has it for 32-bit integers only");
  return from_bits<T>(meet(mask, Collective::kReduce, resolve_reduce<T, Op>, to_bits(value), 0, site));
}

struct Add {
  template <class T>
  T operator()(T a, T b) const {
    return T(unsigned(a) + unsigned(b));
  }
};
struct Greatest {
  template <class T>
  T operator()(T a, T b) const {
    return a < b ? b : a;
  }
};

}  // namespace specdec::emulator

#define threadIdx (::specdec::emulator::current->thread)
#define blockIdx (::specdec::emulator::current->block->index)
#define blockDim (::specdec::emulator::current->block->dim)
#define gridDim (::specdec::emulator::current->block->grid)

using SpecdecSite = specdec::emulator::Site;

inline void __syncthreads(SpecdecSite site = SpecdecSite::here()) {
  specdec::emulator::block_barrier("__syncthreads", false, site);
}
inline int __syncthreads_or(int predicate, SpecdecSite site = SpecdecSite::here()) {
  return specdec::emulator::block_barrier("__syncthreads_or", predicate != 0, site);
}

inline void __syncwarp(unsigned mask = 0xffffffffu, SpecdecSite site = SpecdecSite::here()) {
  using namespace specdec::emulator;
  meet(mask, Collective::kSyncwarp, resolve_nothing, 0, 0, site);
}

template <class T>
T __shfl_sync(unsigned mask, T value, int lane, int width = 32, SpecdecSite site = SpecdecSite::here()) {
  const int self = specdec::emulator::current->lane;
  return specdec::emulator::shuffle(mask, value, (self & -width) + (lane & (width - 1)), site);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int distance, int width = 32, SpecdecSite site = SpecdecSite::here()) {
  const int self = specdec::emulator::current->lane, lane = self ^ distance;
  return specdec::emulator::shuffle(mask, value, lane > (self | (width - 1)) ? specdec::emulator::kOwnValue : lane,
                                    site);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned distance, int width = 32, SpecdecSite site = SpecdecSite::here()) {
  const int self = specdec::emulator::current->lane, lane = self - int(distance);
  return specdec::emulator::shuffle(mask, value, lane < (self & -width) ? specdec::emulator::kOwnValue : lane, site);
}

inline unsigned __ballot_sync(unsigned mask, int predicate, SpecdecSite site = SpecdecSite::here()) {
  return specdec::emulator::ballot(mask, predicate != 0, site);
}
inline int __any_sync(unsigned mask, int predicate, SpecdecSite site = SpecdecSite::here()) {
  return specdec::emulator::ballot(mask, predicate != 0, site) != 0;
}
template <class T>
unsigned __match_any_sync(unsigned mask, T value, SpecdecSite site = SpecdecSite::here()) {
  using namespace specdec::emulator;
  return unsigned(meet(mask, Collective::kMatch, resolve_match, to_bits(value), 0, site));
}

#define SPECDEC_REDUCE(name, Op)                                                             \
  template <class T>                                                                         \
  T __reduce_##name##_sync(unsigned mask, T value, SpecdecSite site = SpecdecSite::here()) { \
    return specdec::emulator::reduce<specdec::emulator::Op>(mask, value, site);              \
  }
SPECDEC_REDUCE(add, Add)
SPECDEC_REDUCE(max, Greatest)
#undef SPECDEC_REDUCE
