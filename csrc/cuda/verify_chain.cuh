// What the layouts of verify_chain share (see verify_chain.cu for which is taken when), and the measurement beside them.
#pragma once
#include "cuda/verify_rows.cuh"

namespace specdec::cuda {

cudaError_t verify_split(const VerifyChainArgs& args, const Launch& launch);
cudaError_t verify_walk(const VerifyChainArgs& args, unsigned cluster, const Launch& launch);
cudaError_t verify_overlap(const VerifyChainArgs& args, const Launch& launch);

// Positions of a sequence that may have a draft law.
SPECDEC_HD int64_t draft_positions(const VerifyChainArgs& args) {
  return args.num_draft + (args.law.cascade_bonus ? 1 : 0);
}

// The reading of all rows that a split step may need, into tables of [rows, tiles, TileTable::kNumbers] in device memory.
cudaError_t launch_scan(const VerifyChainArgs& args, float* target_tables, float* draft_tables, cudaStream_t stream);

// Block rule: w after a draft token of the position. Out of line for the registers.
inline __device__ __noinline__ float next_weight(const TargetLaw& law, const Position& at, int32_t x, float w) {
  return weight_after(law, at, x, w);
}

// The mass of what is left at a position, given that of its tiles; in every lane of a warp.
__device__ __forceinline__ float residual_mass(const Position& at, const float* mass) {
  return at.certain() ? residual_weight(at.left.scale, at.q(at.law.argmax)) : sum_of_tiles(mass, at.row.tiles());
}

}  // namespace specdec::cuda
