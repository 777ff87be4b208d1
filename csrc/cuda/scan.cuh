// The single pass over a row, and what it leaves behind for each tile.
#pragma once
#include "common/status.h"
#include "cuda/held_rows.cuh"
#include "cuda/row.cuh"

namespace specdec::SPECDEC_CUDA_ROWS {

// What truncation does to a row of `vocab` ids.
struct Cut {
  int64_t top_k;  // 0: off
  bool any;       // something may be cut
  bool whole;     // the whole row's mass is needed: nothing is cut, or top-p applies to the uncut row
};

SPECDEC_HD Cut cut_of(const Sampling& s, int32_t vocab) {
  const int64_t top_k = s.top_k < vocab ? s.top_k : 0;
  const bool any = top_k > 0 || s.top_p < 1 || s.min_p > 0;
  const bool whole = !any || (s.top_p < 1 && top_k == 0 && !(s.min_p_first && s.min_p > 0));
  return {top_k, any && !s.greedy, whole && !s.greedy};
}

// A row's tiles, in shared or device memory. Nothing is as wide as the vocabulary: 13 numbers per tile of 1024 ids.
struct TileTable {
  static constexpr int kNumbers = 5 + kGroups;
  float* max;
  float* mass;          // sum of exp((x - max of the tile) / T); find_law makes it relative to the row's max
  float* nan;           // 1 if the tile has a NaN, else 0
  float* raw_sum;       // like mass, at temperature 1, and
  float* raw_weighted;  // the sum of exp(x - max) * (x - max)
  float* group_max;     // [tiles, kGroups]
  TileTable() = default;
  __host__ __device__ TileTable(float* base, int tiles)
      : max(base),
        mass(base + tiles),
        nan(base + 2 * tiles),
        raw_sum(base + 3 * tiles),
        raw_weighted(base + 4 * tiles),
        group_max(base + 5 * tiles) {}
};

// The table of row `index`; tables lie one after the other.
__device__ __forceinline__ TileTable table_of(float* tables, int64_t index, int tiles) {
  return TileTable(tables + index * tiles * TileTable::kNumbers, tiles);
}

// Where a tile's results go: into one table or, in a cluster, to the same place in the shared memory of each of its
// blocks, so that all of them can go on alike.
template <bool kClustered>
struct Team {
  __device__ static unsigned rank() { return kClustered ? cluster_rank() : 0; }
  __device__ static unsigned size() { return kClustered ? cluster_size() : 1; }
  __device__ static void sync() {
    if constexpr (kClustered)
      cluster_sync();
    else
      __syncthreads();
  }
  template <class T>
  __device__ static void store(T* address, T value) {
    if constexpr (kClustered) {
      for (unsigned r = 0; r < size(); ++r) *in_cluster_block(address, r) = value;
    } else {
      *address = value;
    }
  }
  // f(tile) by one warp for each tile of the row.
  template <class F>
  __device__ static void for_each_tile(int tiles, F f) {
    if constexpr (kClustered) {
      cuda::for_each_tile(int(rank()), int(size()), tiles, f);
    } else {
      for (int tile = warp_id(); tile < tiles; tile += num_warps()) f(tile);
    }
  }
};

struct ScanPlan {
  bool mass, groups, raw;
  float inverse_temperature;
  bool probs = false;  // the row holds probabilities (float32): the mass is what sum_of_probs gives
};

SPECDEC_HD ScanPlan plan_of_probs() { return {true, false, false, 1.0f, true}; }

SPECDEC_HD ScanPlan scan_plan(const Sampling& s, int32_t vocab, bool raw) {
  const Cut cut = cut_of(s, vocab);
  if (has_weights(s)) return {!s.greedy, cut.any, false, 1.0f, true};
  return {cut.whole, cut.any, raw, s.inverse_temperature};
}

// The largest of a lane's values, NaN if one is NaN.
__device__ __forceinline__ float max_of(const uint32_t (&words)[kHeld], DType dtype) {
  if (dtype == DType::kFloat32) {
    float max = __uint_as_float(words[0]);
#pragma unroll
    for (int k = 1; k < kHeld; ++k) max = max_or_nan(max, __uint_as_float(words[k]));
    return max;
  }
  uint32_t pair = words[0];
#pragma unroll
  for (int k = 1; k < kHeld / 2; ++k)
    pair = dtype == DType::kBFloat16 ? max_or_nan_bf16x2(pair, words[k]) : max_or_nan_f16x2(pair, words[k]);
  float x[2];
  unpack<2>(&pair, dtype, x);
  return max_or_nan(x[0], x[1]);
}

// Replaces each NaN by -inf.
__device__ __forceinline__ void remove_nan(uint32_t (&words)[kHeld], DType dtype) {
  const uint32_t infinity = negative_infinity(dtype), largest = infinity & 0x7FFFFFFFu;
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    if (dtype == DType::kFloat32) {
      if ((words[k] & 0x7FFFFFFFu) > largest) words[k] = infinity;
    } else if (k < kHeld / 2) {
      if ((words[k] & 0x7FFFu) > (largest & 0x7FFFu)) words[k] = (words[k] & 0xFFFF0000u) | (infinity & 0xFFFFu);
      if ((words[k] & 0x7FFFFFFFu) > (largest | 0xFFFFu)) words[k] = (words[k] & 0xFFFFu) | (infinity & 0xFFFF0000u);
    }
  }
}

// The largest value of a warp's lanes; NaN if one is max_or_nan's NaN.
__device__ __forceinline__ float warp_max(float x) {
  // As signed integers of the same order, in which that NaN is the largest.
  const auto flip = [](int bits) { return bits ^ (bits >> 31 & 0x7FFFFFFF); };
  return __int_as_float(flip(__reduce_max_sync(kAllLanes, flip(__float_as_int(x)))));
}

// The largest value of the lane's group of lanes.
__device__ __forceinline__ float group_max(float x) {
  x = max_or_nan(x, __shfl_xor_sync(kAllLanes, x, 1));
  return max_or_nan(x, __shfl_xor_sync(kAllLanes, x, 2));
}

// What a warp finds in the tiles of a row. A lane writes at most one number per tile: lanes 1, 2, 3, 5 and 6 the first
// five of the table, in its order, and the first lane of each group the group's maximum.
class TileScan {
 public:
  __device__ __forceinline__ TileScan(const RowView& row, const ScanPlan& plan, const TileTable& table)
      : dtype_(row.loaded()),
        probs_(plan.probs && row.dtype == DType::kFloat32),
        lane_(lane_id()),
        scale_(plan.inverse_temperature * kLog2E) {
    const bool first = lane_ % 4 == 0;
    place_ = table.max + (first ? (TileTable::kNumbers - kGroups) * row.tiles() + lane_ / 4
                                : (lane_ - 1 - lane_ / 4) * row.tiles());
    stride_ = first ? kGroups : 1;
    writers_ = kAlways | (plan.mass ? kMass : 0) | (plan.raw ? kRaw : 0) | (plan.groups ? kFirsts : 0);
  }

  // Where the lane's number for a tile belongs; the next tile's is `stride` numbers further on.
  __device__ __forceinline__ float* place(int tile) const { return place_ + tile * stride_; }
  __device__ __forceinline__ int stride() const { return stride_; }

  // Handles a loaded tile; put(address, number) writes.
  template <class Put>
  __device__ __forceinline__ void operator()(uint32_t (&words)[kHeld], float* place, Put put) const {
    float held = max_of(words, dtype_), max = warp_max(held), nan = 0.0f;
    if (max != max) {
      nan = 1.0f;
      remove_nan(words, dtype_);
      held = max_of(words, dtype_);
      max = warp_max(held);
    }
    const bool finite = fabsf(max) < INFINITY;
    float number = lane_ == 3 ? nan : max;
    if (writers_ & kFirsts) {
      const float of_group = group_max(held);
      if (lane_ % 4 == 0) number = of_group;
    }
    if (writers_ & (kMass | kRaw)) {
      float x[kHeld];
      unpack<kHeld>(words, dtype_, x);
      if (writers_ & kMass) {
        const float sum = probs_ ? sum_of_probs(x) : exp_sum(x, max);
        if (lane_ == 2) number = finite || probs_ ? sum : 0.0f;
      }
      if (writers_ & kRaw) {
        float sum = 0.0f, weighted = 0.0f;
        if (finite) raw_moments(x, max, &sum, &weighted);
        if (lane_ == 5) number = sum;
        if (lane_ == 6) number = weighted;
      }
    }
    if (writers_ >> lane_ & 1) put(place, number);
  }

 private:
  // The lanes that write what is wanted.
  static constexpr unsigned kAlways = 0xA, kMass = 0x4, kRaw = 0x60, kFirsts = 0x11111111;

  // Sum over the tile of exp((x - max) / T); NaN unless `max` is finite.
  __device__ __forceinline__ float exp_sum(const float (&x)[kHeld], float max) const {
    float even = 0.0f, odd = 0.0f;
#pragma unroll
    for (int k = 0; k < kHeld; k += 2) {
      even += fast_exp2((x[k] - max) * scale_);
      odd += fast_exp2((x[k + 1] - max) * scale_);
    }
    return warp_reduce(even + odd, Sum{});
  }

  // Sum over the tile of the positive x; infinite if a finite one is negative, as all beyond the row are -inf.
  __device__ __forceinline__ static float sum_of_probs(const float (&x)[kHeld]) {
    float sum = 0.0f;
#pragma unroll
    for (int k = 0; k < kHeld; ++k) sum += x[k] < 0.0f ? (x[k] > -INFINITY ? INFINITY : 0.0f) : x[k];
    return warp_reduce(sum, Sum{});
  }

  __device__ __forceinline__ static void raw_moments(const float (&x)[kHeld], float max, float* sum, float* weighted) {
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      const float weight = exp_of(x[k], max, 1.0f);
      *sum += weight;
      *weighted += weight > 0.0f ? weight * (x[k] - max) : 0.0f;  // 0 * log 0 = 0
    }
    *sum = warp_reduce(*sum, Sum{});
    *weighted = warp_reduce(*weighted, Sum{});
  }

  const DType dtype_;
  const bool probs_;
  const int lane_;
  const float scale_;
  float* place_;
  int stride_;
  unsigned writers_;
};

// A block (or each block of a cluster) reads a whole row into its table.
template <bool kClustered>
__device__ __forceinline__ void scan_row(const RowView& row, const ScanPlan& plan, const TileTable& table) {
  Team<kClustered>::sync();  // the table may still be in use
  const TileScan scan(row, plan, table);
  Team<kClustered>::for_each_tile(row.tiles(), [&](int tile) {
    uint32_t words[kHeld];
    if constexpr (kClustered) wait_until_held(row, tile);
    load_words<kClustered>(row, tile, words);
    scan(words, scan.place(tile), [](auto* address, auto value) { Team<kClustered>::store(address, value); });
  });
  Team<kClustered>::sync();
}

}  // namespace specdec::SPECDEC_CUDA_ROWS
