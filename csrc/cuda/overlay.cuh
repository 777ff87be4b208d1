// Logits processors, applied wherever a row of the target's logits is loaded. Kernels for processed rows are the same
// files compiled again (processed_*.cu) in their own namespace; kernels for other rows contain none of this.
#pragma once
#include "cuda/lists.cuh"
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
cudaError_t token_logprobs(const TokenLogprobsArgs& args, const Launch& launch);
cudaError_t verify_walk(const VerifyChainArgs& args, unsigned cluster, const Launch& launch);
cudaError_t verify_overlap(const VerifyChainArgs& args, void* scratch, const Launch& launch);
cudaError_t verify_tree(const VerifyTreeArgs& args, const Launch& launch);

}  // namespace specdec::cuda::with_processors
#endif

namespace specdec::SPECDEC_CUDA_ROWS {

#ifdef SPECDEC_PROCESSED
constexpr bool kProcessed = true;

using Overlaid = OverlaidRow;
// The overlay of the one sequence whose rows a block reads.
__device__ __forceinline__ Overlay& overlay_of_block() {
  SPECDEC_SHARED(Overlay, one, 1);
  return one[0];
}

// Finds the overlay, by one block; `first`: the number of the sequence's first row among all.
inline __device__ __noinline__ void find_overlay(const ProcessorArgs& all, int64_t b, int64_t first, Drafted drafted) {
  const Overlay found = overlay_of(all, b, first, drafted, [](const int32_t* ids, int32_t n) {
    return block_ascends(n, [ids](int32_t i) { return __ldg(ids + i); });
  });
  by_one([&] { overlay_of_block() = found; });
}

__device__ __forceinline__ Overlaid overlaid(int64_t row) { return {&overlay_of_block(), int32_t(row)}; }

#else
constexpr bool kProcessed = false;

struct Overlaid {
  __device__ constexpr explicit operator bool() const { return false; }
  __device__ constexpr int32_t status() const { return 0; }
  __device__ operator OverlaidRow() const { return {}; }
};

template <class... Given>
__device__ __forceinline__ void find_overlay(const Given&...) {}
#endif

// How a warp goes through a list in the order of ids: 32 entries at a time, one per lane.
template <class Value>
struct Cursor {
  int32_t first = -1;  // the first of the 32 entries; -1: not begun
  int32_t id = 0;      // this lane's id, and its value in the list
  Value value{};

  // Calls f(entry, id, value), in all lanes alike, for the entries with begin <= id < end. Calls must come with
  // ascending ids.
  template <class F>
  __device__ __forceinline__ void for_each(const int32_t* ids, const Value* values, int32_t num_ids, int32_t begin,
                                           int32_t end, F f) {
    if (num_ids == 0) return;
    if (first < 0) look(ids, values, num_ids, seek(ids, num_ids, begin));
    for (;;) {
      int32_t entry = __popc(__ballot_sync(kAllLanes, id < begin));
      const int32_t until = __popc(__ballot_sync(kAllLanes, id < end));
      for (; entry < until; ++entry)
        f(first + entry, __shfl_sync(kAllLanes, id, entry), __shfl_sync(kAllLanes, value, entry));
      if (until < 32) return;
      look(ids, values, num_ids, first + 32);
    }
  }

 private:
  __device__ __forceinline__ void look(const int32_t* ids, const Value* values, int32_t num_ids, int32_t from) {
    const int32_t mine = from + lane_id();
    const bool there = mine < num_ids;
    first = from;
    id = there ? __ldg(ids + mine) : INT32_MAX;
    value = there ? __ldg(values + mine) : Value{};
  }
  // An entry such that the first id that is `least` or more is among the 32 from there on, or comes next.
  __device__ __forceinline__ static int32_t seek(const int32_t* ids, int32_t num_ids, int32_t least) {
    int32_t from = 0;
    for (int32_t n = num_ids; n > 32;) {
      const int32_t step = n / 32 + 1, last = (lane_id() + 1) * step - 1;  // of each lane's part
      const bool less = last < n && __ldg(ids + from + last) < least;
      const int32_t passed = __popc(__ballot_sync(kAllLanes, less)) * step;
      from += passed;
      n = min(n - passed, step - 1);
    }
    return from;
  }
};

struct Cursors {
  Cursor<float> bias;
  Cursor<int32_t> counts;
};

// Applies processors to this thread's kNum ids from `first` on, which lie in one byte of a mask and have the model's
// logits x. With cursors, the ids of all lanes are neighbours and all lanes take part.
template <int kNum>
__device__ __forceinline__ void process(const OverlaidRow& row, int32_t vocab, int32_t first, float (&x)[kNum],
                                        Cursors* cursors) {
  const int32_t begin = cursors ? first - lane_id() * kNum : first;
  const int32_t end = min(vocab, begin + (cursors ? 32 * kNum : kNum));
  if (begin >= end) return;
  const Overlay& all = *row.of;
  if (first < end) {
    const auto bits = [first](const int32_t* words) {
      return words ? unsigned(__ldg(reinterpret_cast<const uint8_t*>(words) + first / 8)) : 0xFFu;
    };
    const unsigned may = (bits(row.bitmask()) & bits(all.allowed)) >> first % 8;
#pragma unroll
    for (int k = 0; k < kNum; ++k)
      if (!(may >> k & 1)) x[k] = -INFINITY;
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
  const auto each = [&](const int32_t* ids, const auto* values, int32_t num_ids, auto Cursors::* cursor, auto f) {
    if (cursors)
      (cursors->*cursor).for_each(ids, values, num_ids, begin, end, f);
    else
      for_each_listed(ids, num_ids, begin, end - begin, [&](int32_t i, int32_t at) { f(i, begin + at, values[i]); });
  };
  each(all.bias_ids, all.bias_values, all.num_bias, &Cursors::bias,
       [&](int32_t i, int32_t id, float added) { change(id, [&](float one) { return row.biased(one, i, added); }); });
  if (!all.penalises) return;
  const Drafted drafted = row.drafted();
  each(all.count_ids, all.counts, all.num_counts, &Cursors::counts, [&](int32_t, int32_t id, int32_t known) {
    change(id, [&](float one) { return all.penalised(one, known, drafted.count(id)); });
  });
  // Ids that are only drafted, each once.
  int32_t seen = 0;
  drafted.for_each([&](int64_t token) {
    const int32_t id = int32_t(token), at = seen++;
    if (token < begin || token >= end) return;
    int32_t times = 0, before = 0, place = 0;
    drafted.for_each([&](int64_t other) {
      before += other == token && place < at;
      times += other == token;
      ++place;
    });
    const int32_t entry = first_at_least(all.count_ids, all.num_counts, id);
    if (before > 0 || (entry < all.num_counts && all.count_ids[entry] == id)) return;
    change(id, [&](float one) { return all.penalised(one, 0, times); });
  });
}

}  // namespace specdec::SPECDEC_CUDA_ROWS
