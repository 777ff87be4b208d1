// The law of a row, and the remainder that a token is drawn from: the one definition that every backend's kernels
// share. Target laws are in target_law.h, acceptance rules in chain_rules.h and tree_rules.h.
#pragma once
#include <math.h>
#include <stdint.h>

#include "common/host_device.h"
#include "common/params.h"
#include "common/status.h"

namespace specdec {

constexpr float kSmallestExponent = -87.0f;        // exp below this is 0: float32 would leave the normal numbers
constexpr float kSmallestTemperature = 0x1p-126f;  // below it 1 / temperature overflows; read as greedy
// The fraction of top_p that a mass has to reach: 0.5 + 0.3 reaches 0.8 however weights and their sums were rounded.
constexpr float kTopPReached = 1 - 0x1p-18f;
constexpr float kSmallestWeight = 0x1p-126f;  // a row without a larger one counts as empty: 1 / max would overflow
constexpr float kSlack = 0.01f;               // a draft's probabilities sum to 1 within it, and none exceeds 1 by more

// Sampling parameters of one sequence, made valid.
struct Sampling {
  float temperature, inverse_temperature;  // 1 where greedy
  int64_t top_k;                           // 0: off
  float top_p, min_p;                      // 1 and 0: off; top_p: the mass that has to be reached
  bool min_p_first, greedy;
  int32_t status;
  RowKind rows;
};

// The parameters of sequence b; a bad one is replaced by the one that does nothing, and flagged.
SPECDEC_HD Sampling sampling_of(const SamplingArgs& args, int64_t b) {
  Sampling s{};
  const float t = args.temperatures ? args.temperatures[b] : args.temperature;
  const float p = args.top_ps ? args.top_ps[b] : args.top_p, m = args.min_ps ? args.min_ps[b] : args.min_p;
  const int64_t k = args.top_ks ? args.top_ks[b] : args.top_k;
  const bool good_t = t >= 0 && t < INFINITY, good_p = p >= 0, good_m = m >= 0 && m <= 1;
  s.status = good_t && good_p && good_m ? 0 : kBadParam;
  s.temperature = good_t ? t : 1.0f;
  s.greedy = s.temperature < kSmallestTemperature;
  s.inverse_temperature = s.greedy ? 1.0f : 1.0f / s.temperature;
  s.top_k = k > 0 ? k : 0;
  s.top_p = good_p && p > 0 && p < 1 ? p * kTopPReached : 1.0f;
  s.min_p = good_m ? m : 0.0f;
  s.min_p_first = args.min_p_first;
  s.rows = args.rows;
  return s;
}

// Greedy whatever the temperature: what acceptance "greedy" makes of a target's parameters.
SPECDEC_HD Sampling made_greedy(Sampling s) {
  s.greedy = true;
  s.inverse_temperature = 1.0f;
  return s;
}

// A row's law: P(v) = exp((logit_v - max) * inverse_temperature) * inverse_normalizer where logit_v >= cutoff, else 0;
// one_hot: all mass on argmax (a greedy row, a +inf logit, nothing possible). For rows of weights: P(v) = weight_v *
// inverse_temperature * inverse_normalizer, where inverse_temperature is 1 / max.
struct RowLaw {
  float max, cutoff, inverse_temperature, normalizer, inverse_normalizer;
  int32_t argmax, status;
  bool one_hot, weights;
};

// Whether rows hold weights rather than logits.
SPECDEC_HD bool has_weights(const Sampling& s) { return s.rows != RowKind::kLogits; }

// A lower bound for every id that is kept, whatever the parameters: a weight must be positive.
SPECDEC_HD float possible_from(const Sampling& s) { return has_weights(s) ? 0x1p-149f : -INFINITY; }

// The same with min-p applied, in a row whose largest value is `max`.
SPECDEC_HD float likely_from(const Sampling& s, float max) {
  if (!(s.min_p > 0)) return possible_from(s);
  return has_weights(s) ? fmaxf(max * s.min_p, possible_from(s)) : max + logf(s.min_p) * s.temperature;
}

// The lower bound of the values to which top-k and top-p apply.
SPECDEC_HD float cut_from(const Sampling& s, float max) {
  return s.min_p_first ? likely_from(s, max) : possible_from(s);
}

// log P of an id with this logit, or weight.
SPECDEC_HD float log_prob_of(const RowLaw& law, float x) {
  if (law.one_hot) return 0.0f;
  const float normalizer = logf(law.normalizer);
  return (law.weights ? logf(x * law.inverse_temperature) : (x - law.max) * law.inverse_temperature) - normalizer;
}

// The law of a row of weights from its maximum and argmax, before its sum is known.
SPECDEC_HD RowLaw law_of_weights(float max, int32_t argmax, int32_t flags, const Sampling& s) {
  RowLaw law{};
  const bool empty = !(max >= kSmallestWeight);
  law.max = empty ? -INFINITY : max;
  law.cutoff = -INFINITY;
  law.inverse_temperature = 1.0f / max;
  law.normalizer = law.inverse_normalizer = 1.0f;
  law.argmax = empty ? 0 : argmax;
  law.status = flags | s.status | (empty ? kEmptyRow : 0) | (max == INFINITY ? kInf : 0);
  law.one_hot = s.greedy || isinf(law.max);
  law.weights = true;
  return law;
}

// Whether a row of probabilities is a distribution. `total`: the sum of the positive ones, infinite if one is negative.
SPECDEC_HD bool is_distribution(float total) { return fabsf(total - 1.0f) <= kSlack; }

// Sets the law's total, as above, of the weights themselves. If it is infinite, all mass is on the largest.
SPECDEC_HD void set_total(RowLaw& law, float total, const Sampling& s) {
  if (s.rows == RowKind::kProbs ? !is_distribution(total) : isinf(total)) law.status |= kBadParam;
  law.one_hot = isinf(total);
}

// The law of a draft row that is not a distribution: 0 everywhere.
SPECDEC_HD RowLaw no_law(int32_t status) {
  RowLaw law{};
  law.argmax = -1;
  law.status = status | kBadDraft;
  law.one_hot = true;
  return law;
}

// The law for an index that names no row: as of a row where nothing is possible, except for its flag.
SPECDEC_HD RowLaw law_of_no_row() {
  RowLaw law{};
  law.max = law.cutoff = -INFINITY;
  law.inverse_temperature = law.normalizer = law.inverse_normalizer = 1.0f;
  law.status = kBadParam;
  law.one_hot = true;
  return law;
}

// Whether a token of probability q can have been drawn.
SPECDEC_HD bool can_give(float q) { return q > 0.0f && q <= 1.0f + kSlack; }

// Residual weights (scale * P - Q)+; scale is 1 for the token rule and w for the block rule.
SPECDEC_HD float residual_weight(float scaled_p, float q) { return fmaxf(scaled_p - q, 0.0f); }

// The weights that a final token is drawn from: (scale P - taken Q)+, with taken_kept in place of taken at ids that are
// kept. By default all of P.
struct Remainder {
  float scale = 1.0f, taken = 0.0f, taken_kept = 0.0f;
  bool mixed = false;  // of a cascade: which ids are kept matters
};

// The residual of w times a position's law after Q is subtracted.
SPECDEC_HD Remainder residual_of(const TargetLaw& law, const Mixture& mixture, float w) {
  const bool mixed = is_cascade(law.kind);
  return {w * mixture.scale, 1.0f, mixed ? 1.0f - w : 1.0f, mixed};
}

// A cascade's law itself.
SPECDEC_HD Remainder cascade_of(const Mixture& mixture) { return {mixture.scale, 0.0f, -1.0f, true}; }

// What replaces an empty remainder: a cascade's law; P if that is empty too, as Q is, or if there is no cascade.
SPECDEC_HD Remainder all_of(const Remainder& empty, const Mixture& mixture) {
  return empty.mixed && empty.taken_kept >= 0.0f ? cascade_of(mixture) : Remainder{};
}
constexpr int kMostRemainders = 3;  // remainders tried one after the other; the last is P

// A given uniform; one outside [0, 1) is read as 0, and flagged.
SPECDEC_HD double uniform_of(const Uniforms& given, int64_t index, int32_t* status) {
  const double u =
      given.is_float64 ? static_cast<const double*>(given.data)[index] : static_cast<const float*>(given.data)[index];
  if (u >= 0 && u < 1) return u;
  *status |= kBadParam;
  return 0;
}

}  // namespace specdec
