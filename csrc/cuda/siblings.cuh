// P and Q at a node of a tree as its rejected children leave them: sums, and draws.
#pragma once
#include "common/siblings.h"
#include "cuda/draw.cuh"

namespace specdec::SPECDEC_CUDA_ROWS {

struct ReadRow {
  RowView row;
  RowLaw law;
};

struct NodeLaws : SiblingLaws<ReadRow, DraftLaw> {
  // P and Q of run j of the lane's ids in a tile with target logits x; both are 0 at the children that were removed.
  struct Both {
    Run p, q;
  };
  __device__ __noinline__ Both of_run(int tile, int j, Run x) const {
    Both both{};
    if (draft.kind != DraftLaw::Kind::kPoint && draft.kind != DraftLaw::Kind::kNone) both.q = draft.of_run(tile, j);
    if (law.weights && !law.one_hot) {
#pragma unroll
      for (int k = 0; k < kRun; ++k) both.p.x[k] = weight_itself(x.x[k], law) * law.inverse_normalizer;
    } else {
#pragma unroll
      for (int k = 0; k < kRun; ++k) both.p.x[k] = prob_of(x.x[k], law, held_id(tile, j * kRun + k));
    }
    for (int i = 0; i < num_removed; ++i) {
#pragma unroll
      for (int k = 0; k < kRun; ++k)
        if (held_id(tile, j * kRun + k) == removed[i]) both.p.x[k] = both.q.x[k] = 0.0f;
    }
    return both;
  }

  // Weights of a draw from the current P: what `masses_of` and `draw_id` ask for.
  __device__ __forceinline__ Run weigh(int tile, int j, const Run& x) const {
    const Both both = of_run(tile, j, x);
    Run weights;
#pragma unroll
    for (int k = 0; k < kRun; ++k)
      weights.x[k] = residual_weight(left.a * both.p.x[k], left.b * (left.lift * both.q.x[k]));
    return weights;
  }

  template <bool kAnywhere, int kStep>
  __device__ float mass(int tile, const TileTable&) const {
    return weighed_mass(*this, tile);
  }
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
      const NodeLaws::Both both = at.of_run(tile, j, load_run(at.row, tile, j));
#pragma unroll
      for (int k = 0; k < kRun; ++k)
        residual += residual_weight(scale * both.p.x[k], taken * (at.left.lift * both.q.x[k])), mass += both.q.x[k];
    }
    residual = warp_reduce(residual, Sum{});
    mass = warp_reduce(mass, Sum{});
    if (lane_id() == 0) Group::store(residuals + tile, residual), Group::store(masses + tile, mass);
  });
}

}  // namespace specdec::SPECDEC_CUDA_ROWS
