#include "cpu/verify_siblings.h"

#include <algorithm>

namespace specdec::cpu {

void SiblingLaws::begin(const DraftRow& q, bool split) {
  draft_ = q;
  split_ = split;
  changed_ = false;
  left_ = {};
  removed_.clear();
}

const SiblingLaws::Removed* SiblingLaws::removed(int32_t id) const {
  for (const Removed& r : removed_)
    if (r.id == id) return &r;
  return nullptr;
}

float SiblingLaws::prob(int32_t id) const {
  if (const Removed* r = removed(id)) return r->prob;
  return residual_weight(left_.a * prob_at(row, p, id), left_.b * draft_.prob(id));
}

float SiblingLaws::draft_prob(int32_t id) const { return removed(id) ? 0.0f : draft_.prob(id) * left_.inverse_mass; }

void SiblingLaws::fill(int tile, float scale, float taken, float* scaled_p, float* q, float* taken_q) const {
  const int n = row.tile_size(tile), first = tile * kTile;
  tile_probs(row, p, tile, scale, scaled_p);
  draft_.tile(tile, n, q);
  for (const Removed& r : removed_)
    if (r.id >= first && r.id < first + n) scaled_p[r.id - first] = q[r.id - first] = 0.0f;
  for (int i = 0; i < n; ++i) taken_q[i] = taken * q[i];
}

float SiblingLaws::reject(int32_t id, float w) {
  const float scale = rejected_scale(left_, w), taken = rejected_taken(left_, w), before = prob(id);
  std::vector<float> residuals(row.tiles()), masses(row.tiles());
  for_each_tile(row, split_, [&](int tile) {
    float scaled_p[kTile], q[kTile], taken_q[kTile];
    const int n = row.tile_size(tile);
    fill(tile, scale, taken, scaled_p, q, taken_q);
    residuals[tile] = kernels().residual_sum(scaled_p, taken_q, n);
    if (id / kTile == tile) q[id % kTile] = 0.0f;
    masses[tile] = kernels().sum(q, n);
  });
  float residual = 0, mass = 0;
  for (float r : residuals) residual += r;
  for (float m : masses) mass += m;
  for (const Removed& r : removed_) residual += w * r.prob;
  // Of P and Q as they are now: its share of the residual, then removed.
  const float own = residual_weight(w * before, draft_prob(id));
  left_ = after_rejection(left_, w, residual, mass);
  if (residual > 0) {
    changed_ = true;
    for (Removed& r : removed_) r.prob *= w / residual;
  }
  removed_.push_back({id, residual > 0 ? own / residual : before});
  return residual;
}

int32_t SiblingLaws::draw(float uniform) const {
  if (!changed_) return draw_token(row, p, scratch, nullptr, 1.0f, uniform, split_);
  const auto weights = [&](int tile, float* out) {
    float q[kTile], taken_q[kTile];
    const int n = row.tile_size(tile), first = tile * kTile;
    fill(tile, left_.a, left_.b, out, q, taken_q);
    for (int i = 0; i < n; ++i) out[i] = residual_weight(out[i], taken_q[i]);
    for (const Removed& r : removed_)
      if (r.id >= first && r.id < first + n) out[r.id - first] = r.prob;
    return n;
  };
  std::vector<float> mass(row.tiles());
  for_each_tile(row, split_, [&](int tile) {
    float out[kTile];
    mass[tile] = kernels().sum(out, weights(tile, out));
  });
  return draw_from_tiles(mass, uniform, weights);
}

}  // namespace specdec::cpu
