// P and Q at a node of a tree, summed and drawn from as its children leave them.
#pragma once
#include "common/siblings.h"
#include "cuda/draw.cuh"

namespace specdec::cuda {

struct ReadRow {
  RowView row;
  RowLaw law;
};

struct NodeLaws : SiblingLaws<ReadRow, DraftLaw> {
  // P and Q of run j of the lane's ids of a tile, x their target logits; both 0 at the children that were removed.
  __device__ __forceinline__ void of_run(int tile, int j, const float* x, float* p, float* q) const {
    if (draft.kind == DraftLaw::Kind::kPoint || draft.kind == DraftLaw::Kind::kNone) {
#pragma unroll
      for (int k = 0; k < kRun; ++k) q[k] = 0.0f;
    } else {
      draft.of_run(tile, j, q);
    }
#pragma unroll
    for (int k = 0; k < kRun; ++k) p[k] = prob_of(x[k], law, held_id(tile, j * kRun + k));
    for (int i = 0; i < num_removed; ++i) {
#pragma unroll
      for (int k = 0; k < kRun; ++k)
        if (held_id(tile, j * kRun + k) == removed[i]) p[k] = q[k] = 0.0f;
    }
  }

  // Weights of a draw from P as it is now, in the place of the target logits: what `masses_of` and `draw_id` ask for.
  __device__ void weigh(int tile, int j, float* x) const {
    float p[kRun], q[kRun];
    of_run(tile, j, x, p, q);
#pragma unroll
    for (int k = 0; k < kRun; ++k) x[k] = residual_weight(left.a * p[k], left.b * q[k]);
  }

  __device__ float mass(int tile, const TileTable&) const { return weighed_mass(*this, tile); }
};

// The RejectionSums of a row's tiles, by a team.
template <bool kClustered>
__device__ __noinline__ void rejection_sums(const NodeLaws& at, float scale, float taken, float* residuals,
                                            float* masses) {
  using Group = Team<kClustered>;
  Group::for_each_tile(at.row.tiles(), [&](int tile) {
    float residual = 0.0f, mass = 0.0f;
#pragma unroll 1
    for (int j = 0; j < kRuns; ++j) {
      float x[kRun], p[kRun], q[kRun];
      load_run(at.row, tile, j, x);
      at.of_run(tile, j, x, p, q);
#pragma unroll
      for (int k = 0; k < kRun; ++k) residual += residual_weight(scale * p[k], taken * q[k]), mass += q[k];
    }
    residual = warp_reduce(residual, Sum{});
    mass = warp_reduce(mass, Sum{});
    if (lane_id() == 0) Group::store(residuals + tile, residual), Group::store(masses + tile, mass);
  });
}

}  // namespace specdec::cuda
