// How blocks that read a row together share its tiles; and rows that a cluster holds in shared memory, where each block
// brings its own tiles by bulk copies. Whatever looks at such a row later finds it there (start_of in load.cuh).
#pragma once
#include "cuda/load.cuh"

namespace specdec::SPECDEC_CUDA_ROWS {

// The number of tiles of a row that each of `size` blocks gets: the same number for each of their warps.
SPECDEC_HD int part_of(int tiles, int size, int warps) {
  const int rounds = (tiles + warps - 1) / warps;
  return (rounds + size - 1) / size * warps;
}

// Calls f(tile), by one warp each, for the tiles of block `rank`.
template <class F>
__device__ __forceinline__ void for_each_tile(int rank, int size, int tiles, F f) {
  const int part = part_of(tiles, size, num_warps()), end = min(tiles, (rank + 1) * part);
  for (int tile = rank * part + warp_id(); tile < end; tile += num_warps()) f(tile);
}

// A block's place for a row in dynamic shared memory: barriers, one for each round of its warps, then its tiles and the
// piece after them, which the last tile may reach into.
constexpr int kMostRounds = 16, kBarrierBytes = kMostRounds * int(sizeof(uint64_t));

SPECDEC_HD int bytes_of_place(int part, DType dtype) {
  return kBarrierBytes + (part * kTile * size_of(dtype) + 2 * 16 + 127) / 128 * 128;
}

__device__ __forceinline__ uint64_t* barrier_of(const RowView& row, int round) {
  SPECDEC_DYNAMIC_SHARED(shared);
  return reinterpret_cast<uint64_t*>(shared + (row.held / 128 * 128 - kBarrierBytes)) + round;
}

// Starts to bring the row to the place at `place`; by one thread of each block of a cluster, before a barrier.
__device__ __forceinline__ void hold(RowView& row, int place) {
  SPECDEC_DYNAMIC_SHARED(shared);
  const int part = part_of(row.tiles(), int(cluster_size()), num_warps()), rounds = part / num_warps();
  const int skipped = int(reinterpret_cast<uintptr_t>(row.data) % 16);
  const int tile_bytes = kTile * size_of(row.dtype), row_end = skipped + row.vocab * size_of(row.dtype);
  const int whole_end = row_end / 16 * 16, begin = int(cluster_rank()) * part * tile_bytes;
  const int end = begin + part * tile_bytes + 16;
  row.held = place + kBarrierBytes + skipped;
  row.part = part;
  const char* const from = row.data - skipped;
  unsigned char* const to = shared + place + kBarrierBytes - begin;
  for (int round = 0; round < rounds; ++round) init_mbarrier(barrier_of(row, round), 1);
  publish_mbarriers();
  int at = begin;
  for (int round = 0; round < rounds; ++round) {
    const int until = min(begin + (round + 1) * num_warps() * tile_bytes + 16, whole_end), bytes = max(until - at, 0);
    expect_bytes(barrier_of(row, round), unsigned(bytes));
    if (bytes > 0) bulk_copy(to + at, from + at, unsigned(bytes), barrier_of(row, round));
    at += bytes;
  }
  // The part of the last piece that belongs to the row.
  if (whole_end < begin || whole_end >= end) return;
  for (int byte = max(whole_end, skipped); byte < row_end; byte += 2)
    *reinterpret_cast<uint16_t*>(to + byte) = __ldg(reinterpret_cast<const uint16_t*>(from + byte));
}

// Waits until this block's tile has arrived; returns at once if the row is not held.
__device__ __forceinline__ void wait_until_held(const RowView& row, int tile) {
  if (row.held >= 0) wait_for_phase(barrier_of(row, tile % row.part / num_warps()), 0);
}

// Waits until all of this block's tiles have arrived; a block must not exit before.
__device__ __forceinline__ void wait_until_held(const RowView& row) {
  for (int round = 0; row.held >= 0 && round < row.part / num_warps(); ++round)
    wait_for_phase(barrier_of(row, round), 0);
}

}  // namespace specdec::SPECDEC_CUDA_ROWS
