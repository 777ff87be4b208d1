// What kernels share that have a block, or a cluster of blocks, a sequence and read rows only as far as a rule gets.
#pragma once
#include "cuda/rows.cuh"
#include "cuda/verify_rows.cuh"

namespace specdec::cuda {

constexpr int kWalkThreads = 256;  // two blocks fit a multiprocessor: one reads while the other looks for a law
constexpr unsigned kMaxCluster = 8;

// Long and called from several places: out of line, each is there once. `raw`: null where the raw row is not wanted.
template <bool kClustered>
__device__ __noinline__ void read_row(Reading& reading, RawRow* raw) {
  scan_row<kClustered>(reading.row, scan_plan(reading.sampling, reading.row.vocab, raw != nullptr), reading.table);
  find_law(reading, raw != nullptr);
  if (raw == nullptr || warp_id() != 0) return;
  const RawRow found = raw_row(reading);
  if (lane_id() == 0) *raw = found;
}

template <bool kClustered>
__device__ __noinline__ Fixed best_noisy(const Position& from, const TileTable& table, int64_t key) {
  BestNoisy best;
  Team<kClustered>::for_each_tile(from.row.tiles(), [&](int tile) {
    if (table.max[tile] >= from.law.cutoff) best.see(from.row, from.law, tile, key, nullptr);
  });
  return block_reduce(best.key, Fixed(0), Max{});
}

// The id of the best noisy score of a row that was read, by a team.
template <bool kClustered>
__device__ __forceinline__ int32_t noisy_token(const Position& from, const TileTable& table, int64_t key) {
  SPECDEC_SHARED(Fixed, box, kMaxCluster);
  using Group = Team<kClustered>;
  Fixed found = best_noisy<kClustered>(from, table, key);
  if constexpr (kClustered) {
    Group::sync();
    if (threadIdx.x == 0) Group::store(box + Group::rank(), found);
    Group::sync();
    for (unsigned r = 0; r < Group::size(); ++r) found = Max{}(found, box[r]);
  }
  return noisy_id(found);
}

// An id drawn from the tiles' masses, by a block; -1 if nothing is left.
template <class From>
__device__ __forceinline__ int32_t draw(const From& from, const float* mass, float uniform) {
  SPECDEC_SHARED(int32_t, box, 1);
  __syncthreads();
  if (warp_id() == 0) {
    const int32_t id = draw_id(from, mass, uniform);
    if (lane_id() == 0) box[0] = id;
  }
  __syncthreads();
  return box[0];
}

}  // namespace specdec::cuda
