// The one pass over a row: what each tile of it leaves behind.
#pragma once
#include "common/status.h"
#include "cuda/row.cuh"

namespace specdec::cuda {

// What truncation does to a row of `vocab` ids.
struct Cut {
  int64_t top_k;  // 0: off
  bool any;       // something may be cut
  bool whole;     // the mass of the whole row is needed: nothing is cut, or top-p of the uncut row
};

SPECDEC_HD Cut cut_of(const Sampling& s, int32_t vocab) {
  const int64_t top_k = s.top_k < vocab ? s.top_k : 0;
  const bool any = top_k > 0 || s.top_p < 1 || s.min_p > 0;
  const bool whole = !any || (s.top_p < 1 && top_k == 0 && !(s.min_p_first && s.min_p > 0));
  return {top_k, any && !s.greedy, whole && !s.greedy};
}

// A row's tiles, in shared or device memory. Nothing here is as wide as the vocabulary: 13 numbers a tile of 1024 ids.
struct TileTable {
  static constexpr int kNumbers = 5 + kGroups;
  float* max;
  float* mass;          // sum of exp((x - max of the tile) / T); find_law makes it relative to the row's max
  float* raw_sum;       // the same at temperature 1, and
  float* raw_weighted;  // the sum of exp(x - max) * (x - max)
  int32_t* flags;
  float* group_max;  // [tiles, kGroups]
  TileTable() = default;
  __host__ __device__ TileTable(float* base, int tiles)
      : max(base),
        mass(base + tiles),
        raw_sum(base + 2 * tiles),
        raw_weighted(base + 3 * tiles),
        flags(reinterpret_cast<int32_t*>(base + 4 * tiles)),
        group_max(base + 5 * tiles) {}
};

// Where a tile's results go: one table, or (a cluster) the same place in the shared memory of each of its blocks, so that
// all of them can go on alike.
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
    for (int tile = int(rank()) * num_warps() + warp_id(); tile < tiles; tile += int(size()) * num_warps()) f(tile);
  }
};

struct ScanPlan {
  bool mass, groups, raw;
  float inverse_temperature;
};

SPECDEC_HD ScanPlan scan_plan(const Sampling& s, int32_t vocab, bool raw) {
  const Cut cut = cut_of(s, vocab);
  return {cut.whole, cut.any, raw, s.inverse_temperature};
}

// Sum over the tile of exp((x - max) * scale / log2(e)); `max` is finite. NaN where an x is NaN.
__device__ __forceinline__ float tile_exp_sum(const float (&x)[kHeld], float max, float scale) {
  float even = 0.0f, odd = 0.0f;
#pragma unroll
  for (int k = 0; k < kHeld; k += 2) {
    even += fast_exp2((x[k] - max) * scale);
    odd += fast_exp2((x[k + 1] - max) * scale);
  }
  return warp_reduce(even + odd, Sum{});
}

// One warp reads one tile.
template <class Put>
__device__ __forceinline__ void scan_tile(const RowView& row, int tile, const ScanPlan& plan, const TileTable& table,
                                          Put put) {
  float x[kHeld];
  load_tile(row, tile, x);
  float held_max = -INFINITY;
  bool nan = false;
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    nan |= x[k] != x[k];
    held_max = fmaxf(held_max, x[k]);  // passes over NaN
  }
  if (__any_sync(kAllLanes, nan)) {
    nan = true;
#pragma unroll
    for (int k = 0; k < kHeld; ++k) x[k] = fmaxf(x[k], -INFINITY);
  }
  // Pairs, then fours of lanes: a group's maximum on the way to the tile's.
  float max = fmaxf(held_max, __shfl_xor_sync(kAllLanes, held_max, 1));
  const float group_max = fmaxf(max, __shfl_xor_sync(kAllLanes, max, 2));
  max = group_max;
#pragma unroll
  for (int step = 4; step < 32; step *= 2) max = fmaxf(max, __shfl_xor_sync(kAllLanes, max, step));
  const bool finite = max > -INFINITY && max < INFINITY;
  float mass = 0.0f, raw_sum = 0.0f, raw_weighted = 0.0f;
  if (plan.mass && finite) mass = tile_exp_sum(x, max, plan.inverse_temperature * kLog2E);
  if (plan.raw && finite) {
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      const float shifted = x[k] - max;
      const float weight = shifted >= kSmallestExponent ? fast_exp2(shifted * kLog2E) : 0.0f;
      raw_sum += weight;
      raw_weighted += weight > 0.0f ? weight * shifted : 0.0f;  // 0 * log 0 = 0
    }
    raw_sum = warp_reduce(raw_sum, Sum{});
    raw_weighted = warp_reduce(raw_weighted, Sum{});
  }
  if (plan.groups && lane_id() % 4 == 0) put(table.group_max + tile * kGroups + lane_id() / 4, group_max);
  if (lane_id() == 0) {
    put(table.max + tile, max);
    put(table.flags + tile, nan ? int32_t(kNaN) : 0);
    if (plan.mass) put(table.mass + tile, mass);
    if (plan.raw) put(table.raw_sum + tile, raw_sum), put(table.raw_weighted + tile, raw_weighted);
  }
}

// A block (or each block of a cluster) reads a whole row into its table.
template <bool kClustered>
__device__ __forceinline__ void scan_row(const RowView& row, const ScanPlan& plan, const TileTable& table) {
  Team<kClustered>::sync();  // the table may still be in use
  Team<kClustered>::for_each_tile(row.tiles(), [&](int tile) {
    scan_tile(row, tile, plan, table, [](auto* address, auto value) { Team<kClustered>::store(address, value); });
  });
  Team<kClustered>::sync();
}

}  // namespace specdec::cuda
