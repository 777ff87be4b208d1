// Logits processors, applied wherever a row of the target's logits is loaded. Kernels of rows that they change are the same
// files compiled once more (processed_*.cu), in a namespace of their own: those of other rows hold nothing of this.
#pragma once
#include "common/processors.h"
#include "cuda/ops.h"
#include "cuda/search.cuh"

// The namespace of everything that knows what a RowView is.
#ifdef SPECDEC_PROCESSED
#define SPECDEC_CUDA_ROWS cuda::inline with_processors
#else
#define SPECDEC_CUDA_ROWS cuda

namespace specdec::cuda::with_processors {

cudaError_t row_stats(const RowStatsArgs& args, const Launch& launch);
cudaError_t warp_probs(const WarpProbsArgs& args, const Launch& launch);
cudaError_t sample(const SampleArgs& args, const Launch& launch);
cudaError_t verify_walk(const VerifyChainArgs& args, unsigned cluster, const Launch& launch);
cudaError_t verify_overlap(const VerifyChainArgs& args, void* scratch, const Launch& launch);
cudaError_t verify_tree(const VerifyTreeArgs& args, const Launch& launch);

}  // namespace specdec::cuda::with_processors
#endif

namespace specdec::SPECDEC_CUDA_ROWS {

#ifdef SPECDEC_PROCESSED
constexpr bool kProcessed = true;

// What a row of a sequence is made into; of a row without one, nothing.
struct Overlaid {
  const Overlay* sequence = nullptr;  // of its first row
  int32_t row = 0;
  __device__ explicit operator bool() const { return sequence != nullptr; }
  __device__ Overlay operator*() const { return sequence->of_row(row); }
  __device__ int32_t status() const { return sequence ? sequence->status : 0; }
};

using GivenProcessors = ProcessorArgs;

// That of the one sequence whose rows a block reads.
__device__ __forceinline__ Overlay& overlay_of_block() {
  SPECDEC_SHARED(Overlay, one, 1);
  return one[0];
}

// Finds it, by the block; `first`: the sequence's first row among all.
inline __device__ __noinline__ void find_overlay(const ProcessorArgs& all, int64_t b, int64_t first,
                                                 const Drafted& drafted) {
  const Overlay found = overlay_of(all, b, first, drafted, [](const int32_t* ids, int32_t n) {
    int32_t bad = 0;
    for (int32_t i = 1 + int32_t(threadIdx.x); i < n; i += int32_t(blockDim.x))
      bad |= !may_follow(__ldg(ids + i), __ldg(ids + i - 1));
    return block_reduce(bad, 0, Or{}) == 0;
  });
  by_one([&] { overlay_of_block() = found; });
}

__device__ __forceinline__ Overlaid overlaid(int64_t row) { return {&overlay_of_block(), int32_t(row)}; }

#else
constexpr bool kProcessed = false;

struct Overlaid {
  __device__ constexpr explicit operator bool() const { return false; }
  __device__ Overlay operator*() const { return {}; }
  __device__ constexpr int32_t status() const { return 0; }
};

struct GivenProcessors {};

template <class... Given>
__device__ __forceinline__ void find_overlay(const Given&...) {}
__device__ __forceinline__ Overlaid overlaid(int64_t) { return {}; }
#endif

// The first of `n` ascending ids that is `least` or more, by a whole warp.
__device__ __forceinline__ int32_t first_at_least_by_warp(const int32_t* ids, int32_t n, int32_t least) {
  int32_t begin = 0;
  while (n > 0) {
    const int32_t step = n / 32 + 1, mine = (lane_id() + 1) * step - 1;  // of each lane's part the last
    const bool less = mine < n && __ldg(ids + begin + mine) < least;
    const int32_t passed = __popc(__ballot_sync(kAllLanes, less)) * step;
    begin += passed;
    n = min(n - passed, step - 1);
  }
  return begin;
}

// f(entry, id) of the entries of a list whose ids are from `begin` on, below `end`; by a whole warp, all lanes alike.
template <class F>
__device__ __forceinline__ void for_each_listed_by_warp(const int32_t* ids, int32_t num_ids, int32_t begin, int32_t end,
                                                        F f) {
  if (num_ids == 0) return;
  int32_t first = first_at_least_by_warp(ids, num_ids, begin);
  for (int32_t there = 32; there == 32; first += there) {
    const int32_t entry = first + lane_id(), id = entry < num_ids ? __ldg(ids + entry) : INT32_MAX;
    there = __popc(__ballot_sync(kAllLanes, id < end));
    for (int32_t i = 0; i < there; ++i) f(first + i, __shfl_sync(kAllLanes, id, i));
  }
}

// The kNum ids of this thread from `first` on, which are of one word of a mask and have the model's logits x, as processors
// make them; given the model's logit of any id. kByWarp: those of all lanes are neighbours, and all lanes come.
template <int kNum, bool kByWarp, class FromModel>
__device__ __forceinline__ void process(const Overlay& overlay, int32_t vocab, int32_t first, float (&x)[kNum],
                                        FromModel from_model) {
  const int32_t begin = kByWarp ? first - lane_id() * kNum : first;
  const int32_t end = min(vocab, begin + (kByWarp ? 32 * kNum : kNum));
  if (begin >= end) return;
  if (first < end) {
    uint32_t allowed = ~0u;
    if (overlay.bitmask) allowed &= uint32_t(__ldg(overlay.bitmask + first / 32));
    if (overlay.allowed) allowed &= uint32_t(__ldg(overlay.allowed + first / 32));
#pragma unroll
    for (int k = 0; k < kNum; ++k)
      if (!(allowed >> (first % 32 + k) & 1)) x[k] = -INFINITY;
  }
  const auto change = [&](int32_t id, auto made_of) {
    if (id < first || id >= first + kNum) return;
    float one = 0.0f;
#pragma unroll
    for (int k = 0; k < kNum; ++k)
      if (first + k == id) one = x[k];
    one = made_of(one);
#pragma unroll
    for (int k = 0; k < kNum; ++k)
      if (first + k == id) x[k] = one;
  };
  const auto each = [&](const int32_t* ids, int32_t num_ids, auto f) {
    if constexpr (kByWarp)
      for_each_listed_by_warp(ids, num_ids, begin, end, f);
    else
      for_each_listed(ids, num_ids, begin, end - begin, [&](int32_t i, int32_t at) { f(i, begin + at); });
  };
  each(overlay.bias_ids, overlay.num_bias,
       [&](int32_t i, int32_t id) { change(id, [&](float one) { return overlay.biased(one, i); }); });
  if (!overlay.counts) return;
  each(overlay.count_ids, overlay.num_counts, [&](int32_t i, int32_t id) {
    const int32_t known = __ldg(overlay.counts + i);
    change(id, [&](float one) { return overlay.penalised(one, known > 0, known / 2); });
  });
  overlay.drafted.for_each([&](int64_t id) {  // counted once more: anew from the model's logit
    if (id < begin || id >= end) return;
    change(int32_t(id), [&](float) { return processed(overlay, int32_t(id), from_model(int32_t(id))); });
  });
}

}  // namespace specdec::SPECDEC_CUDA_ROWS
