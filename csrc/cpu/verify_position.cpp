#include "cpu/verify_position.h"

#include <algorithm>
#include <cmath>

#include "cpu/tile_sums.h"

namespace specdec::cpu {
namespace {

constexpr Sampling kRaw{1.0f, 1.0f, 0, 1.0f, 0.0f, false, false, 0, RowKind::kLogits};  // temperature 1, nothing cut

}  // namespace

void Position::mix(const TargetLaw& law, const DraftLaw& draft) {
  law_ = law;
  draft_ = draft;
  float surprise_q = 0;
  if (is_cascade(law.kind)) {
    RowLaw raw_p;
    raw_target_ = read_raw(target.row, &raw_p);
    raw_draft_ = read_raw(draft.mapped().row, &raw_q_);
    if (asks_surprise_of_argmax(law))
      surprise_q = surprise(raw_target_, MappedRow{target.row}.logit(raw_draft_.argmax), raw_draft_.argmax);
  }
  mixture = begin_mixture(law, raw_target_, raw_draft_, surprise_q, &measure_);
  if (decides_kept(measure_)) finish();
}

// Entropies are only for laws with log loss.
RawRow Position::read_raw(const RowView& row, RowLaw* law) const {
  thread_local Reading raw;
  read_row(row, kRaw, target.team, raw);
  *law = raw.law;
  float log_normalizer, entropy = 0;
  if (law_.variant) raw_moments(row, law->max, target.team, &log_normalizer, &entropy);
  return {law->max, law->inverse_normalizer, entropy, law->argmax};
}

void Position::finish() {
  if (measure_ != Measure::kNothing) end_mixture(law_, raw_target_, raw_draft_, measure_, measure(), mixture);
  measure_ = Measure::kNothing;
}

float Position::measure() const {
  if (measure_ == Measure::kLossyScale) return lossy_scale();
  if (measure_ == Measure::kTotalVariation) return mass_of({1.0f, 1.0f, 1.0f, false});
  const RowView& row = target.row;
  return sum_by_tile(target, [&](int tile) {
    float share[kTile];
    const int n = row.tile_size(tile);
    if (measure_ == Measure::kDeferredMass) {
      draft_.tile(tile, n, share);
      scale_kept(tile, 0.0f, 1.0f, share);
    } else {
      cross_entropy(tile, share);
    }
    return kernels().sum(share, n);
  });
}

void Position::cross_entropy(int tile, float* share) const {
  float logit[kTile];
  const RowView& row = target.row;
  const int n = row.tile_size(tile);
  DraftLaw(draft_.mapped(), raw_q_).tile(tile, n, share);
  row.kernels().load(row.tile(tile), n, logit);
  // One logarithm per row, not one per id: if max is finite, surprise falls by as much as the logit rises.
  const float max = raw_target_.max, least = surprise(raw_target_, max, raw_target_.argmax);
  for (int i = 0; i < n; ++i) {
    const float surprise_p =
        std::isinf(max) ? surprise(raw_target_, logit[i], tile * kTile + i) : least + (max - logit[i]);
    share[i] = measured(measure_, 0, 0, false, share[i], surprise_p);
  }
}

// Lists P and Q where any scale may leave something, so that both are found only once.
float Position::lossy_scale() const {
  if (draft_.is_point()) return 1.0f;  // only the direction of the residual counts
  const RowView& row = target.row;
  std::vector<float> p_list, q_list;
  float ps[kTile], qs[kTile];
  for (int tile = 0; tile < row.tiles(); ++tile) {
    const int n = row.tile_size(tile);
    tile_probs(row, target.law, tile, 1.0f, ps);
    draft_.tile(tile, n, qs);
    for (int i = 0; i < n; ++i) {
      if (!(mixture.accept * ps[i] > qs[i])) continue;
      p_list.push_back(ps[i]);
      q_list.push_back(qs[i]);
    }
  }
  std::vector<float> shares((p_list.size() + kTile - 1) / kTile);
  return exact_scale(mixture.accept, [&](float scale) {
    for (size_t share = 0; share < shares.size(); ++share) {
      const size_t first = share * kTile;
      const int n = int(std::min<size_t>(kTile, p_list.size() - first));
      for (int i = 0; i < n; ++i) ps[i] = scale * p_list[first + i];
      shares[share] = kernels().residual_sum(ps, &q_list[first], n);
    }
    return sum_of(shares);
  });
}

void Position::set_residual(float weight) {
  finish();
  left = residual_of(law_, mixture, weight);
}

void Position::set_cascade() {
  finish();
  left = cascade_of(mixture);
}

float Position::accept() {
  if (is_cascade(law_.kind)) finish();  // a lossy law's scale matters only for a recovered token
  return mixture.accept;
}

Weights Position::weights(const Remainder& remainder) const {
  if (!remainder.mixed)
    return remainder.taken > 0 ? residual_weights(target, draft_, remainder.scale) : weights_of(target);
  return weights_left(target, [this, remainder](int tile, float* scaled_p, float* taken_q) {
    tile_probs(target.row, target.law, tile, remainder.scale, scaled_p);
    draft_.tile(tile, target.row.tile_size(tile), taken_q);
    scale_kept(tile, remainder.taken_kept, remainder.taken, taken_q);
  });
}

float Position::mass_of(const Remainder& remainder) const {
  if (target.law.one_hot && !remainder.mixed) return residual_weight(remainder.scale, q(target.law.argmax));
  return weights(remainder).total();
}

int32_t Position::draw(double uniform) const {
  Remainder from = left;
  for (int tried = 1;; ++tried, from = all_of(from, mixture)) {
    if (target.law.one_hot && !from.mixed) return target.law.argmax;  // of such a row no masses are known
    const Weights rest = weights(from);
    if (rest.any() || tried == kMostRemainders) return rest.draw(uniform);
  }
}

void Position::scale_kept(int tile, float kept, float other, float* q) const {
  const MappedRow decides = deciding();
  const int n = target.row.tile_size(tile);
  if (mixture.kept_id < 0) {
    float logit[kTile];
    decides.load(tile, n, logit);
    return kernels().scale_kept(logit, n, mixture.bound, kept, other, q);
  }
  for (int i = 0; i < n; ++i) q[i] *= decides.own_id(tile * kTile + i) == mixture.kept_id ? kept : other;
}

}  // namespace specdec::cpu
