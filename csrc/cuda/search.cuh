// How a block searches for a cut-off among values: it sums their measures in each part of a range and narrows the
// range. Sums are integers, so that the order of adding does not matter.
#pragma once
#include "common/params.h"
#include "cuda/warp.cuh"

namespace specdec::cuda {

constexpr int kParts = 4;      // into which a search divides its range
constexpr int kMostWarps = 8;  // per block that searches

using Fixed = unsigned long long;

// Runs f() in one thread; the whole block sees what it writes to shared memory.
template <class F>
__device__ __forceinline__ void by_one(F f) {
  __syncthreads();
  if (threadIdx.x == 0) f();
  __syncthreads();
}

// The sum over the warp, below 2^63, in every lane; added in pieces whose sums fit 32 bits.
__device__ __forceinline__ Fixed warp_sum(Fixed x) {
  constexpr unsigned kBits = 21, kMask = (1u << kBits) - 1;
  const Fixed low = __reduce_add_sync(kAllLanes, unsigned(x) & kMask);
  const Fixed middle = __reduce_add_sync(kAllLanes, unsigned(x >> kBits) & kMask);
  const Fixed high = __reduce_add_sync(kAllLanes, unsigned(x >> 2 * kBits));
  return low + (middle << kBits) + (high << 2 * kBits);
}

// The sum over the lanes up to and including this one.
template <class T>
__device__ __forceinline__ T sum_until(T x) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const T other = __shfl_up_sync(kAllLanes, x, step);
    if (lane_id() >= step) x += other;
  }
  return x;
}

// A float's place in the order of floats, the same for both zeros.
__device__ __forceinline__ uint32_t key_of(float x) { return ordered(x + 0.0f); }

// Where a cut-off is searched for: values with low <= key < high.
struct Range {
  uint32_t low, high;
  uint32_t grain;            // keys this close belong to one value
  Fixed above = 0;           // the measure of what is higher, and
  Fixed inside = ~Fixed(0);  // of what the range holds, once known

  __device__ bool holds(float x) const { return key_of(x) - low < high - low; }
  __device__ bool is_one() const { return high - low <= grain; }
  __device__ float lowest() const { return from_ordered(low); }

  // Where one of kParts begins: evenly spaced by value, as logits are spread, or by key if that would take long.
  __device__ uint32_t part(int i) const {
    const float span = from_ordered(high - 1) - lowest();
    const bool by_value = high - low > 1u << 25 && span > 0x1p-6f && span < 0x1p10f;
    if (i > 0 && by_value) return key_of(lowest() + span * (float(i) / kParts));
    return low + uint32_t(uint64_t(high - low) * unsigned(i) / kParts);
  }
};

__device__ __forceinline__ Range range_of(float lowest, float highest, DType dtype) {
  const uint32_t grain = dtype == DType::kFloat32 ? 1 : dtype == DType::kBFloat16 ? 1 << 16 : 1 << 13;
  const uint32_t low = key_of(lowest), possible = key_of(-INFINITY) + 1;
  return {low < possible ? possible : low, key_of(highest) + 1, grain};
}

// A block's search for the largest value c such that the measure of {x >= c} reaches `goal`; if it never does, for the
// lowest value of any measure. In shared memory, as the functions that call each other would need too many registers.
struct Search {
  Range range;
  uint32_t begin[kParts];  // where the range's parts begin
  Fixed goal;
  Fixed sum[kMostWarps][kParts];  // per warp: the measure of a part and all higher ones
  int count;                      // of the list

  // By warp 0.
  __device__ void set(const Range& found) {
    if (lane_id() < kParts) begin[lane_id()] = found.part(lane_id());
    if (lane_id() == 0) range = found;
  }
  __device__ void start(const Range& all, Fixed mass) {
    __syncthreads();
    if (warp_id() == 0) set(all);
    if (threadIdx.x == 0) goal = mass;
    __syncthreads();
  }
};

// The block's one search.
__device__ __forceinline__ Search& search() {
  SPECDEC_SHARED(Search, one, 1);
  return one[0];
}

// Narrows a search until its range holds one value, or few() values at most, since each measures at least what the
// lowest would. each(f) calls f(x) for this thread's values.
template <class Each, class Measure, class Few>
__device__ __forceinline__ void narrow(Each each, Measure measure, Few few) {
#pragma unroll 1
  for (;;) {
    const int most = few() - few() / 16;  // a weight may be too small, though not by as much
    if (search().range.is_one() || search().range.inside <= unsigned(most) * measure(search().range.lowest())) return;
    Fixed sum[kParts] = {};
    each([&](float x) {
      if (!search().range.holds(x)) return;
      const uint32_t key = key_of(x);
      const Fixed m = measure(x);
#pragma unroll
      for (int i = 0; i < kParts; ++i) sum[i] += key >= search().begin[i] ? m : 0;
    });
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      const Fixed of_warp = warp_sum(sum[i]);
      if (lane_id() == i) search().sum[warp_id()][i] = of_warp;
    }
    __syncthreads();
    if (warp_id() == 0) {
      Range range = search().range;
      Fixed total = 0;
      for (int w = 0; w < num_warps() && lane_id() < kParts; ++w) total += search().sum[w][lane_id()];
      const Fixed all = __shfl_sync(kAllLanes, total, 0);
      const bool reached = range.above + total >= search().goal || total == all;
      const int part = 31 - __clz(int(__ballot_sync(kAllLanes, lane_id() < kParts && reached)));
      const Fixed higher = __shfl_sync(kAllLanes, total, part + 1);
      range.inside = __shfl_sync(kAllLanes, total, part) - higher;
      range.above += higher;
      if (part + 1 < kParts) range.high = search().begin[part + 1];
      range.low = search().begin[part];
      __syncwarp();
      search().set(range);
    }
    __syncthreads();
  }
}

// A lower bound of the n-th largest value that a block's threads have found; `most`: a thread's largest, `having`: the
// first so many have any. -inf if fewer than n have. The threads form n or more sets, each with a value this large.
__device__ __forceinline__ float bound_of_nth(float most, int having, int64_t n) {
  if (n > having) return -INFINITY;
  int width = 1;  // threads of a set
  while (width < 32 && 2 * width * n <= having) width *= 2;
  for (int step = 1; step < width; step *= 2) most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, step));
  return block_reduce(int(threadIdx.x) / width * width < having ? most : INFINITY, INFINITY, Min{});
}

// By one warp: takes places for `mine` more entries of each lane in a list of length `count`; returns the lane's first.
__device__ __forceinline__ int take_places(int mine, int* count) {
  const int until = sum_until(mine);
  int first = 0;
  if (lane_id() == 31 && until > 0) first = atomicAdd(count, until);
  return __shfl_sync(kAllLanes, first, 31) + until - mine;
}

}  // namespace specdec::cuda
