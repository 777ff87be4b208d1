#include "cpu/verify_position.h"

#include <algorithm>
#include <cmath>

namespace specdec::cpu {
namespace {

constexpr Sampling kRaw{1.0f, 1.0f, 0, 1.0f, 0.0f, false, false, 0};  // temperature 1, nothing cut

float total(const std::vector<float>& mass) {
  float sum = 0;
  for (float m : mass) sum += m;
  return sum;
}

}  // namespace

void Position::mix(const TargetLaw& law, const DraftRow& draft, bool split) {
  law_ = law;
  draft_ = draft;
  split_ = split;
  float surprise_q = 0;
  if (is_cascade(law.kind)) {
    RowLaw raw_p;
    raw_target_ = read_raw(row, &raw_p);
    raw_draft_ = read_raw(draft.mapped().row, &raw_q_);
    if (law.kind == LawKind::kBiLD && law.variant)
      surprise_q = surprise(raw_target_, MappedRow{row}.logit(raw_draft_.argmax), raw_draft_.argmax);
  }
  mixture_ = begin_mixture(law, raw_target_, raw_draft_, surprise_q, &measure_);
  if (measure_ == Measure::kTotalVariation || measure_ == Measure::kCrossEntropy) finish();  // says what is kept
}

// Entropies are for the laws with log loss only.
RawRow Position::read_raw(const RowView& row, RowLaw* law) const {
  thread_local RowScratch scratch;
  *law = analyse_row(row, kRaw, split_, scratch);
  float log_normalizer, entropy = 0;
  if (law_.variant) raw_moments(row, law->max, split_, &log_normalizer, &entropy);
  return {law->max, law->inverse_normalizer, entropy, law->argmax};
}

void Position::finish() {
  if (measure_ != Measure::kNothing) end_mixture(law_, raw_target_, raw_draft_, measure_, measure(), mixture_);
  measure_ = Measure::kNothing;
}

float Position::measure() const {
  if (measure_ == Measure::kLossyScale) return lossy_scale();
  if (measure_ == Measure::kTotalVariation) return cpu::residual_mass(row, p, scratch, draft_, 1.0f, split_);
  std::vector<float> mass(row.tiles());
  for_each_tile(row, split_, [&](int tile) {
    float share[kTile];
    const int n = row.tile_size(tile);
    if (measure_ == Measure::kDeferredMass) {
      draft_.tile(tile, n, share);
      scale_kept(tile, 0.0f, 1.0f, share);
    } else {
      cross_entropy(tile, share);
    }
    mass[tile] = kernels().sum(share, n);
  });
  return total(mass);
}

void Position::cross_entropy(int tile, float* share) const {
  float logit[kTile];
  const int n = row.tile_size(tile);
  DraftRow(draft_.mapped(), raw_q_).tile(tile, n, share);
  row.kernels().load(row.at(tile * kTile), n, logit);
  // One logarithm a row, not one an id: where max is finite, surprise falls by as much as the logit rises.
  const float max = raw_target_.max, least = surprise(raw_target_, max, raw_target_.argmax);
  for (int i = 0; i < n; ++i) {
    const float surprise_p =
        std::isinf(max) ? surprise(raw_target_, logit[i], tile * kTile + i) : least + (max - logit[i]);
    share[i] = measured(measure_, 0, 0, false, share[i], surprise_p);
  }
}

// Lists P and Q where anything may be left of any scale, so that both are found once.
float Position::lossy_scale() const {
  if (draft_.is_point()) return 1.0f;  // only the direction of the residual counts
  std::vector<float> p_list, q_list;
  float ps[kTile], qs[kTile];
  for (int tile = 0; tile < row.tiles(); ++tile) {
    const int n = row.tile_size(tile);
    tile_probs(row, p, tile, 1.0f, ps);
    draft_.tile(tile, n, qs);
    for (int i = 0; i < n; ++i) {
      if (!(mixture_.accept * ps[i] > qs[i])) continue;
      p_list.push_back(ps[i]);
      q_list.push_back(qs[i]);
    }
  }
  return exact_scale(mixture_.accept, [&](float scale) {
    float sum = 0;
    for (size_t first = 0; first < p_list.size(); first += kTile) {
      const int n = int(std::min<size_t>(kTile, p_list.size() - first));
      for (int i = 0; i < n; ++i) ps[i] = scale * p_list[first + i];
      sum += kernels().residual_sum(ps, &q_list[first], n);
    }
    return sum;
  });
}

bool Position::accepts(int32_t id, float coin) {
  if (is_cascade(law_.kind)) finish();  // a lossy law's scale is for what is recovered
  return accept_token(coin, mixture_.accept * prob_at(row, p, id), draft_.prob(id));
}

float Position::next_weight(float weight, int32_t id) {
  finish();
  const float q = draft_.prob(id);
  return next_block_weight(weight, law_at(law_, mixture_, prob_at(row, p, id), q, keeps(id)), q);
}

float Position::residual_mass(float weight) {
  finish();
  if (is_cascade(law_.kind)) return total(masses(residual_weights(weight)));
  return cpu::residual_mass(row, p, scratch, draft_, weight * mixture_.scale, split_);
}

int32_t Position::recover(float weight, float uniform) {
  finish();
  if (!is_cascade(law_.kind)) return draw_token(row, p, scratch, &draft_, weight * mixture_.scale, uniform, split_);
  const Weights weights = residual_weights(weight);
  const std::vector<float> mass = masses(weights);
  return any(mass) ? draw_from(weights, mass, uniform) : draw(uniform);
}

int32_t Position::draw(float uniform) {
  finish();
  const Weights weights{mixture_.scale, 0.0f, -1.0f};
  return draw_from(weights, masses(weights), uniform);
}

void Position::scale_kept(int tile, float kept, float other, float* q) const {
  const MappedRow decides = deciding();
  const int n = row.tile_size(tile);
  if (mixture_.kept_id < 0) {
    float logit[kTile];
    decides.load(tile, n, logit);
    return kernels().scale_kept(logit, n, mixture_.bound, kept, other, q);
  }
  for (int i = 0; i < n; ++i) q[i] *= decides.own_id(tile * kTile + i) == mixture_.kept_id ? kept : other;
}

void Position::fill(const Weights& weights, int tile, float* scaled_p, float* taken_q) const {
  tile_probs(row, p, tile, weights.scale, scaled_p);
  draft_.tile(tile, row.tile_size(tile), taken_q);
  scale_kept(tile, weights.kept, weights.other, taken_q);
}

std::vector<float> Position::masses(const Weights& weights) const {
  std::vector<float> mass(row.tiles());
  for_each_tile(row, split_, [&](int tile) {
    float p[kTile], q[kTile];
    fill(weights, tile, p, q);
    mass[tile] = kernels().residual_sum(p, q, row.tile_size(tile));
  });
  return mass;
}

int32_t Position::draw_from(const Weights& weights, const std::vector<float>& mass, float uniform) const {
  return draw_from_tiles(mass, uniform, [&](int tile, float* p) {
    float q[kTile];
    const int n = row.tile_size(tile);
    fill(weights, tile, p, q);
    for (int i = 0; i < n; ++i) p[i] = residual_weight(p[i], q[i]);
    return n;
  });
}

}  // namespace specdec::cpu
