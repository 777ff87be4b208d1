// A row of logits in tiles of 1024 ids. A warp works on a tile: each lane holds 32 ids of it, the same ones for every dtype
// and alignment, so that sums over a tile always add in the same order.
#pragma once
#include "common/law.h"
#include "cuda/warp.cuh"

namespace specdec::cuda {

constexpr float kLog2E = 1.44269504f;
constexpr int kRuns = 4, kRun = 8, kHeld = kRuns * kRun;  // a lane's ids: run j is 8 ids from (j * 32 + lane) * 8
constexpr int kGroups = 8;                                // of a tile: four neighbouring lanes' ids, 128 each
static_assert(kHeld * 32 == kTile);

struct RowView {
  const char* data;
  DType dtype;
  int32_t vocab;
  __host__ __device__ int tiles() const { return tiles_of(vocab); }
};

SPECDEC_HD int size_of(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

SPECDEC_HD RowView row_view(const Rows& rows, int64_t b, int64_t i) {
  return {static_cast<const char*>(rows.data) + (b * rows.stride_batch + i * rows.stride_row) * size_of(rows.dtype),
          rows.dtype, rows.vocab};
}

// The id that the k-th of a lane's held values belongs to.
__device__ __forceinline__ int32_t held_id(int tile, int k) {
  return tile * kTile + (k / kRun * 32 + lane_id()) * kRun + k % kRun;
}

__device__ __forceinline__ float half_to_float(uint32_t bits, DType dtype) {
  return dtype == DType::kBFloat16 ? __uint_as_float(bits << 16) : half_bits_to_float(uint16_t(bits));
}

__device__ __forceinline__ float logit_at(const RowView& row, int32_t id) {
  if (row.dtype == DType::kFloat32) return __ldg(reinterpret_cast<const float*>(row.data) + id);
  return half_to_float(__ldg(reinterpret_cast<const uint16_t*>(row.data) + id), row.dtype);
}

// 16 bytes of half-precision values as floats.
__device__ __forceinline__ void unpack(const uint4& raw, DType dtype, float* x) {
  const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int k = 0; k < kRun; ++k) x[k] = half_to_float(words[k / 2] >> (k % 2 * 16) & 0xFFFFu, dtype);
}

__device__ __forceinline__ void unpack(const float4& a, const float4& b, float* x) {
  const float run[kRun] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
  for (int k = 0; k < kRun; ++k) x[k] = run[k];
}

__device__ __forceinline__ bool aligned(const RowView& row) { return reinterpret_cast<uintptr_t>(row.data) % 16 == 0; }

// Loads run j of the lane's ids of a tile; -inf beyond the row. NaN stays NaN.
__device__ __forceinline__ void load_run(const RowView& row, int tile, int j, float* x) {
  const int32_t first = held_id(tile, j * kRun);
  if (!aligned(row) || first + kRun > row.vocab) {
#pragma unroll
    for (int k = 0; k < kRun; ++k) x[k] = first + k < row.vocab ? logit_at(row, first + k) : -INFINITY;
  } else if (row.dtype == DType::kFloat32) {
    const float4* vectors = reinterpret_cast<const float4*>(row.data) + first / 4;
    unpack(__ldg(vectors), __ldg(vectors + 1), x);
  } else {
    unpack(__ldg(reinterpret_cast<const uint4*>(row.data) + first / kRun), row.dtype, x);
  }
}

// Loads all of the lane's ids of a tile, of a whole one with every load in flight before the first is used.
__device__ __forceinline__ void load_tile(const RowView& row, int tile, float (&x)[kHeld]) {
  if (!aligned(row) || (tile + 1) * int64_t(kTile) > row.vocab) {
#pragma unroll
    for (int j = 0; j < kRuns; ++j) load_run(row, tile, j, x + j * kRun);
  } else if (row.dtype == DType::kFloat32) {
    const float4* vectors = reinterpret_cast<const float4*>(row.data) + held_id(tile, 0) / 4;
    float4 raw[2 * kRuns];
#pragma unroll
    for (int j = 0; j < 2 * kRuns; ++j) raw[j] = __ldg(vectors + j / 2 * 64 + j % 2);
#pragma unroll
    for (int j = 0; j < kRuns; ++j) unpack(raw[2 * j], raw[2 * j + 1], x + j * kRun);
  } else {
    const uint4* vectors = reinterpret_cast<const uint4*>(row.data) + held_id(tile, 0) / kRun;
    uint4 raw[kRuns];
#pragma unroll
    for (int j = 0; j < kRuns; ++j) raw[j] = __ldg(vectors + j * 32);
#pragma unroll
    for (int j = 0; j < kRuns; ++j) unpack(raw[j], row.dtype, x + j * kRun);
  }
}

// exp((x - max) * inverse_temperature) where x >= cutoff, else 0; 0 for NaN and below kSmallestExponent.
__device__ __forceinline__ float weight_of(float x, const RowLaw& law) {
  const float exponent = (x - law.max) * law.inverse_temperature;
  return x >= law.cutoff && exponent >= kSmallestExponent ? fast_exp2(exponent * kLog2E) : 0.0f;
}

// P of an id whose logit is x.
__device__ __forceinline__ float prob_of(float x, const RowLaw& law, int32_t id) {
  return law.one_hot ? float(id >= 0 && id == law.argmax) : weight_of(x, law) * law.inverse_normalizer;
}

__device__ __forceinline__ float prob_at(const RowView& row, const RowLaw& law, int32_t id) {
  if (law.one_hot) return id == law.argmax ? 1.0f : 0.0f;
  return weight_of(logit_at(row, id), law) * law.inverse_normalizer;
}

}  // namespace specdec::cuda
