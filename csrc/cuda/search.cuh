// How a block searches for a cut-off among values: by sums of what they measure, in parts of a range that it narrows. Sums
// are integers, so that no order of adding matters.
#pragma once
#include "common/params.h"
#include "cuda/warp.cuh"

namespace specdec::cuda {

constexpr int kParts = 4;      // that a search divides its range into
constexpr int kMostWarps = 8;  // of a block that searches

using Fixed = unsigned long long;

// f() by one thread; what it writes to shared memory is there for the whole block.
template <class F>
__device__ __forceinline__ void by_one(F f) {
  __syncthreads();
  if (threadIdx.x == 0) f();
  __syncthreads();
}

// The sum over the warp, below 2^63, in every lane: in pieces whose sums fit 32 bits.
__device__ __forceinline__ Fixed warp_sum(Fixed x) {
  constexpr unsigned kBits = 21, kMask = (1u << kBits) - 1;
  const Fixed low = __reduce_add_sync(kAllLanes, unsigned(x) & kMask);
  const Fixed middle = __reduce_add_sync(kAllLanes, unsigned(x >> kBits) & kMask);
  const Fixed high = __reduce_add_sync(kAllLanes, unsigned(x >> 2 * kBits));
  return low + (middle << kBits) + (high << 2 * kBits);
}

// The sum of the lanes' values up to this lane's.
template <class T>
__device__ __forceinline__ T sum_until(T x) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const T other = __shfl_up_sync(kAllLanes, x, step);
    if (lane_id() >= step) x += other;
  }
  return x;
}

// A float's place in their order, where both zeros are one.
__device__ __forceinline__ uint32_t key_of(float x) { return ordered(x + 0.0f); }

// Where a cut-off is searched for: values whose keys are from `low` on, below `high`.
struct Range {
  uint32_t low, high;
  uint32_t grain;            // keys so near to each other are of one value
  Fixed above = 0;           // the measure of what is higher, and
  Fixed inside = ~Fixed(0);  // of what the range holds, once that is known

  __device__ bool holds(float x) const { return key_of(x) - low < high - low; }
  __device__ bool is_one() const { return high - low <= grain; }
  __device__ float lowest() const { return from_ordered(low); }

  // Where one of kParts begins: alike in value, as logits are spread, or alike in keys where that would take long.
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

// A block's search for the largest value c such that `goal` is reached by the measure of {x >= c}; for the lowest value of
// any measure if it never is. In shared memory, as what calls each other would need too many registers.
struct Search {
  Range range;
  uint32_t begin[kParts];  // of the range's parts
  Fixed goal;
  Fixed sum[kMostWarps][kParts];  // of a warp: what is in a part or higher
  int count;                      // of listed values

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

// Narrows a search until its range holds one value, or few() at most, as all measure what the lowest would or more. each(f)
// calls f(x) for this thread's values.
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

// A lower bound of the n-th largest of what a block's threads have found, of which the first `having` have anything and
// `most` is a thread's largest; -inf if those are fewer. The threads are parted into n sets or more: each has one so large.
__device__ __forceinline__ float bound_of_nth(float most, int having, int64_t n) {
  if (n > having) return -INFINITY;
  int width = 1;  // threads of a set
  while (width < 32 && 2 * width * n <= having) width *= 2;
  for (int step = 1; step < width; step *= 2) most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, step));
  return block_reduce(int(threadIdx.x) / width * width < having ? most : INFINITY, INFINITY, Min{});
}

// By a warp: places for `mine` more things of each lane in a list of which `count` is the length; the first of them.
__device__ __forceinline__ int take_places(int mine, int* count) {
  const int until = sum_until(mine);
  int first = 0;
  if (lane_id() == 31 && until > 0) first = atomicAdd(count, until);
  return __shfl_sync(kAllLanes, first, 31) + until - mine;
}

}  // namespace specdec::cuda
