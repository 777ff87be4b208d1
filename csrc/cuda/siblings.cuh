// P and Q at one node of a tree while its children are tried and rejected one after the other.
#pragma once
#include "cuda/draw.cuh"

namespace specdec::cuda {

struct SiblingLaws {
  RowView row;
  RowLaw law;
  DraftLaw draft;
  Siblings left;
  bool changed;      // P is no longer the row's own
  int32_t* removed;  // the children rejected at the nodes of the path in hand, each node's behind its parent's
  int begin, end;    // its own of them

  __device__ bool is_removed(int32_t id) const {
    for (int i = begin; i < end; ++i)
      if (removed[i] == id) return true;
    return false;
  }

  __device__ float prob(int32_t id) const {
    return is_removed(id) ? 0.0f : residual_weight(left.a * prob_at(row, law, id), left.b * draft.prob(id));
  }
  __device__ float draft_prob(int32_t id) const { return is_removed(id) ? 0.0f : draft.prob(id) * left.inverse_mass; }
  __device__ bool certain() const { return law.one_hot && !changed; }

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
    for (int i = begin; i < end; ++i) {
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

// The sums of (scale P - taken Q)+ and of Q over a row's tiles, by a team.
template <bool kClustered>
__device__ __noinline__ void rejection_sums(const SiblingLaws& at, float scale, float taken, float* residuals,
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

// P becomes norm((w P - Q)+), unless that is empty, and child `id` leaves Q; returns the sum of (w P - Q)+. A child is
// rejected only where w P < Q, so that it leaves P too. By a team.
template <bool kClustered>
__device__ float reject(SiblingLaws& at, int32_t id, float w, float* residuals, float* masses) {
  const float scale = rejected_scale(at.left, w), taken = rejected_taken(at.left, w);
  Team<kClustered>::sync();  // the sums may still be in use, and what was removed
  by_one([&] { at.removed[at.end++] = id; });
  rejection_sums<kClustered>(at, scale, taken, residuals, masses);
  Team<kClustered>::sync();
  const float residual = ordered_sum(residuals, at.row.tiles()), mass = ordered_sum(masses, at.row.tiles());
  by_one([&] {
    at.left = after_rejection(at.left, w, residual, mass);
    at.changed = at.changed || residual > 0;
  });
  return residual;
}

}  // namespace specdec::cuda
