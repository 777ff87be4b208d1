#include "cpu/siblings.h"

#include "cpu/tile_sums.h"

namespace specdec::cpu {

void NodeLaws::fill(int tile, float scale, float taken, float* scaled_p, float* q, float* taken_q) const {
  const int n = row.tile_size(tile), first = tile * kTile;
  tile_probs(row, law, tile, scale, scaled_p);
  draft.tile(tile, n, q);
  for (int i = 0; i < num_removed; ++i)
    if (const int32_t at = removed[i] - first; at >= 0 && at < n) scaled_p[at] = q[at] = 0.0f;
  for (int i = 0; i < n; ++i) taken_q[i] = taken * (left.lift * q[i]);
}

RejectionSums NodeLaws::sums(float scale, float taken) const {
  std::vector<float> masses(row.tiles());
  const float residual = sum_by_tile(*this, [&](int tile) {
    float scaled_p[kTile], q[kTile], taken_q[kTile];
    fill(tile, scale, taken, scaled_p, q, taken_q);
    masses[tile] = kernels().sum(q, row.tile_size(tile));
    return kernels().residual_sum(scaled_p, taken_q, row.tile_size(tile));
  });
  return {residual, sum_of(masses)};
}

int32_t NodeLaws::draw(double uniform) const {
  if (!changed) return draw_token(*this, uniform);
  const auto weights = [this](int tile, float* out) {
    float q[kTile], taken_q[kTile];
    fill(tile, left.a, left.b, out, q, taken_q);
    for (int i = 0; i < row.tile_size(tile); ++i) out[i] = residual_weight(out[i], taken_q[i]);
  };
  std::vector<float> mass = by_tile(*this, [&](int tile) {
    float out[kTile];
    weights(tile, out);
    return kernels().sum(out, row.tile_size(tile));
  });
  return Weights{std::move(mass), weights}.draw(uniform);
}

}  // namespace specdec::cpu
