#include "cpu/verify_siblings.h"

#include <algorithm>

namespace specdec::cpu {

void SiblingLaws::begin(const DraftLaw& q) {
  draft_ = q;
  changed_ = false;
  left_ = {};
  removed_.clear();
}

bool SiblingLaws::removed(int32_t id) const {
  return std::find(removed_.begin(), removed_.end(), id) != removed_.end();
}

float SiblingLaws::prob(int32_t id) const {
  return removed(id) ? 0.0f : residual_weight(left_.a * prob_at(target.row, target.law, id), left_.b * draft_.prob(id));
}

float SiblingLaws::draft_prob(int32_t id) const { return removed(id) ? 0.0f : draft_.prob(id) * left_.inverse_mass; }

void SiblingLaws::fill(int tile, float scale, float taken, float* scaled_p, float* q, float* taken_q) const {
  const int n = target.row.tile_size(tile), first = tile * kTile;
  tile_probs(target.row, target.law, tile, scale, scaled_p);
  draft_.tile(tile, n, q);
  for (int32_t id : removed_)
    if (id >= first && id < first + n) scaled_p[id - first] = q[id - first] = 0.0f;
  for (int i = 0; i < n; ++i) taken_q[i] = taken * q[i];
}

float SiblingLaws::reject(int32_t id, float w) {
  const float scale = rejected_scale(left_, w), taken = rejected_taken(left_, w);
  removed_.push_back(id);
  const RowView& row = target.row;
  std::vector<float> residuals(row.tiles()), masses(row.tiles());
  for_each_tile(row, target.split, [&](int tile) {
    float scaled_p[kTile], q[kTile], taken_q[kTile];
    const int n = row.tile_size(tile);
    fill(tile, scale, taken, scaled_p, q, taken_q);
    residuals[tile] = kernels().residual_sum(scaled_p, taken_q, n);
    masses[tile] = kernels().sum(q, n);
  });
  float residual = 0, mass = 0;
  for (float r : residuals) residual += r;
  for (float m : masses) mass += m;
  left_ = after_rejection(left_, w, residual, mass);
  changed_ = changed_ || residual > 0;
  return residual;
}

int32_t SiblingLaws::draw(float uniform) const {
  if (!changed_) return draw_token(target, uniform);
  const auto weights = [&](int tile, float* out) {
    float q[kTile], taken_q[kTile];
    const int n = target.row.tile_size(tile);
    fill(tile, left_.a, left_.b, out, q, taken_q);
    for (int i = 0; i < n; ++i) out[i] = residual_weight(out[i], taken_q[i]);
  };
  std::vector<float> mass = by_tile(target, [&](int tile) {
    float out[kTile];
    weights(tile, out);
    return kernels().sum(out, target.row.tile_size(tile));
  });
  return Weights{std::move(mass), weights}.draw(uniform);
}

}  // namespace specdec::cpu
