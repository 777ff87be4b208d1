// Laws of rows and positions: the one definition that every backend's kernels share. What is accepted: chain_rules.h and
// tree_rules.h.
#pragma once
#include <math.h>
#include <stdint.h>

#include "common/host_device.h"
#include "common/params.h"
#include "common/status.h"

namespace specdec {

constexpr float kSmallestExponent = -87.0f;        // exp below this is 0: float32 would leave the normal numbers
constexpr float kSmallestTemperature = 0x1p-126f;  // below it 1 / temperature overflows; read as greedy

// Sampling parameters of one sequence, made valid.
struct Sampling {
  float temperature, inverse_temperature;  // 1 where greedy
  int64_t top_k;                           // 0: off
  float top_p, min_p;                      // 1 and 0: off
  bool min_p_first, greedy;
  int32_t status;
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
  s.top_p = good_p && p > 0 && p < 1 ? p : 1.0f;
  s.min_p = good_m ? m : 0.0f;
  s.min_p_first = args.min_p_first;
  return s;
}

// Greedy whatever the temperature: what acceptance "greedy" makes of a target's parameters.
SPECDEC_HD Sampling made_greedy(Sampling s) {
  s.greedy = true;
  s.inverse_temperature = 1.0f;
  return s;
}

// A row's law: P(v) = exp((logit_v - max) * inverse_temperature) * inverse_normalizer where logit_v >= cutoff, else 0;
// one_hot: all mass on argmax (a greedy row, a +inf logit, nothing possible).
struct RowLaw {
  float max, cutoff, inverse_temperature, normalizer, inverse_normalizer;
  int32_t argmax, status;
  bool one_hot;
};

// Residual weights (scale * P - Q)+; scale is 1 for the token rule and w for the block rule.
SPECDEC_HD float residual_weight(float scaled_p, float q) { return fmaxf(scaled_p - q, 0.0f); }

// ---- Target laws (Narasimhan et al., arXiv 2405.19261): the one place where a law is told from another ----
//
// With P, Q the laws after the sampling transform and p, q the raw ones (temperature 1, nothing cut), a position's law is
//   lossless, lossy:  max(min(Q, accept P), scale P), where that sums to 1
//   a cascade:        kept(v) Q(v) + scale P(v)
// and its residual (w law - Q)+ is (w scale P - Q)+, or, where v is kept, (w scale P - (1 - w) Q)+.

SPECDEC_HD bool is_cascade(LawKind kind) { return kind >= LawKind::kChow; }

constexpr float kAllKept = -INFINITY, kNoneKept = __builtin_nanf("");  // bounds: no logit is >= NaN

struct Mixture {
  float accept = 1.0f, scale = 1.0f;
  float bound = kNoneKept;  // v is kept iff its logit, in the row that decides, is >= bound ...
  int32_t kept_id = -1;     // ... or, if this is an id, iff it is this one (of the row that decides)
};

// A row that decides is the target's, but for TokenV1 the draft's.
SPECDEC_HD bool draft_decides(LawKind kind) { return kind == LawKind::kTokenV1; }

SPECDEC_HD bool is_kept(const Mixture& mixture, float logit, int32_t id) {
  return mixture.kept_id >= 0 ? id == mixture.kept_id : fmaxf(logit, -INFINITY) >= mixture.bound;  // NaN counts as -inf
}

// What a cascade looks at in a raw row: p(v) = exp(logit - max) * max_prob, or all on argmax where max is infinite.
struct RawRow {
  float max, max_prob, entropy;  // entropy in nats
  int32_t argmax;
};

// -log of the raw probability of an id.
SPECDEC_HD float surprise(const RawRow& row, float logit, int32_t id) {
  if (isinf(row.max)) return id == row.argmax ? 0.0f : INFINITY;
  return (row.max - fmaxf(logit, -INFINITY)) - logf(row.max_prob);
}

// What has to be summed over a position's ids before its law is known.
enum class Measure : int32_t {
  kNothing,
  kDeferredMass,    // sum of Q over the ids not kept
  kTotalVariation,  // sum of (P - Q)+
  kCrossEntropy,    // - sum of q log p
  kLossyScale       // the scale at which a lossy law sums to 1: see exact_scale
};

// An id's share of a measure.
SPECDEC_HD float measured(Measure measure, float p, float q, bool kept, float raw_q, float surprise_p) {
  if (measure == Measure::kDeferredMass) return kept ? 0.0f : q;
  if (measure == Measure::kTotalVariation) return fmaxf(p - q, 0.0f);
  return raw_q > 0.0f ? raw_q * surprise_p : 0.0f;
}

// Keeps the ids whose raw probability in `row` is at least `threshold`.
SPECDEC_HD void keep_from(Mixture& mixture, float threshold, const RawRow& row) {
  mixture.bound = threshold <= 0 ? kAllKept : kNoneKept;
  if (!(threshold > 0) || !(threshold <= 1)) return;
  if (isinf(row.max))
    mixture.kept_id = row.argmax;
  else
    mixture.bound = row.max + logf(threshold / row.max_prob);
}

SPECDEC_HD void set_deferral(Mixture& mixture, bool defer) {
  mixture.scale = mixture.accept = defer ? 1.0f : 0.0f;
  mixture.bound = defer ? kNoneKept : kAllKept;
}

// How much better the target seems: the Diff and Opt rules compare it with alpha and alpha TV.
SPECDEC_HD float deferral_gain(const TargetLaw& law, const RawRow& p, const RawRow& q) {
  return law.variant ? q.entropy - p.entropy : p.max_prob - q.max_prob;
}

// A position's mixture as far as it is known without a measure, and which measure it needs. `surprise_q`: that of the
// draft's argmax under p (BiLD's second distance). Raw rows count for cascades only.
SPECDEC_HD Mixture begin_mixture(const TargetLaw& law, const RawRow& p, const RawRow& q, float surprise_q,
                                 Measure* measure) {
  Mixture mixture{};
  *measure = Measure::kNothing;
  switch (law.kind) {
    case LawKind::kLossless:
      break;
    case LawKind::kLossy:
      mixture.accept = 1.0f / (1.0f - law.alpha);
      mixture.scale = 1.0f / law.beta;
      if (law.variant) *measure = Measure::kLossyScale;
      break;
    case LawKind::kChow:
      set_deferral(mixture, law.variant ? q.entropy > law.alpha : q.max_prob < 1.0f - law.alpha);
      break;
    case LawKind::kDiff:
      set_deferral(mixture, deferral_gain(law, p, q) > law.alpha);
      break;
    case LawKind::kOpt: {
      const float gain = deferral_gain(law, p, q);
      set_deferral(mixture, gain > law.alpha);
      // TV is in [0, 1]: between 0 and alpha it decides
      if (gain > fminf(law.alpha, 0.0f) && gain <= fmaxf(law.alpha, 0.0f)) *measure = Measure::kTotalVariation;
      break;
    }
    case LawKind::kTokenV1:
    case LawKind::kTokenV2:
    case LawKind::kTokenV3:
      keep_from(mixture, law.kind == LawKind::kTokenV3 ? (1.0f - law.alpha) * p.max_prob : p.max_prob - law.alpha,
                draft_decides(law.kind) ? q : p);
      *measure = Measure::kDeferredMass;
      break;
    case LawKind::kBiLD:
      set_deferral(mixture, surprise_q > law.alpha);
      if (!law.variant) *measure = Measure::kCrossEntropy;
      break;
  }
  return mixture;
}

// Whether a measure decides which ids are kept, and not only how much of P there is.
SPECDEC_HD bool decides_kept(Measure measure) {
  return measure == Measure::kTotalVariation || measure == Measure::kCrossEntropy;
}

// What a measure decides.
SPECDEC_HD void end_mixture(const TargetLaw& law, const RawRow& p, const RawRow& q, Measure measure, float sum,
                            Mixture& mixture) {
  switch (measure) {
    case Measure::kNothing:
      break;
    case Measure::kDeferredMass:
      mixture.scale = mixture.accept = sum;
      break;
    case Measure::kTotalVariation:
      set_deferral(mixture, deferral_gain(law, p, q) > law.alpha * sum);
      break;
    case Measure::kCrossEntropy:
      set_deferral(mixture, sum > law.alpha);
      break;
    case Measure::kLossyScale:
      mixture.scale = sum;
      break;
  }
}

// Lossy with beta "exact": 1/beta in [0, 1] such that sum (P/beta - Q)+ = 1 - A with A = sum min(Q, accept P), by
// bisection; left(s) is the sum of (s P - Q)+.
template <class Left>
SPECDEC_HD float exact_scale(float accept, Left left) {
  const float rejected = fmaxf(left(accept) + (1.0f - accept), 0.0f);  // sum (accept P - Q)+ = accept - A
  float low = 0.0f, high = 1.0f;
  for (int i = 0; i < 24; ++i) {
    const float middle = 0.5f * (low + high);
    if (left(middle) > rejected)
      high = middle;
    else
      low = middle;
  }
  return high;
}

// A position's law at an id, given P, Q and whether it is kept.
SPECDEC_HD float law_at(const TargetLaw& law, const Mixture& mixture, float p, float q, bool kept) {
  if (is_cascade(law.kind)) return (kept ? q : 0.0f) + mixture.scale * p;
  return fmaxf(fminf(q, mixture.accept * p), mixture.scale * p);
}

// What a final token is drawn from: weights (scale P - taken Q)+, with taken_kept for taken at the ids that are kept. By
// itself all of P.
struct Remainder {
  float scale = 1.0f, taken = 0.0f, taken_kept = 0.0f;
  bool mixed = false;  // of a cascade: it matters what is kept
};

// What is left of w times a position's law after Q.
SPECDEC_HD Remainder residual_of(const TargetLaw& law, const Mixture& mixture, float w) {
  const bool mixed = is_cascade(law.kind);
  return {w * mixture.scale, 1.0f, mixed ? 1.0f - w : 1.0f, mixed};
}

// A cascade's law itself.
SPECDEC_HD Remainder cascade_of(const Mixture& mixture) { return {mixture.scale, 0.0f, -1.0f, true}; }

// Where a remainder has nothing left: a cascade's law, else P.
SPECDEC_HD Remainder all_of(const Remainder& empty, const Mixture& mixture) {
  return empty.mixed ? cascade_of(mixture) : Remainder{};
}

// ---- Token trees: siblings drawn without replacement ----

// P and Q at a node some of whose children were rejected: (a P - b Q)+ and Q / mass, but for the children themselves, whose P
// is known and whose Q is 0. A chain of "P becomes norm((w P - Q)+)" never needs more, as the inner (.)+ is in the outer one.
struct Siblings {
  float a = 1.0f, b = 0.0f, inverse_mass = 1.0f;
};

// (w P - Q)+ of the P and Q that are left is (scale P - taken Q)+ of the original ones.
SPECDEC_HD float rejected_scale(const Siblings& left, float w) { return w * left.a; }
SPECDEC_HD float rejected_taken(const Siblings& left, float w) { return w * left.b + left.inverse_mass; }

// What is left after another child: `residual` is the sum of (w P - Q)+, `mass` that of the original Q without the children.
SPECDEC_HD Siblings after_rejection(const Siblings& left, float w, float residual, float mass) {
  Siblings out = left;
  if (residual > 0) {
    out.a = rejected_scale(left, w) / residual;
    out.b = rejected_taken(left, w) / residual;
  }
  out.inverse_mass = mass > 0 ? 1.0f / mass : 0.0f;
  return out;
}

// Typical acceptance (Cai et al., arXiv 2401.10774, section 2.3.1).
SPECDEC_HD float typical_threshold(float epsilon, float delta, float entropy) {
  return fminf(epsilon, delta * expf(-entropy));
}

SPECDEC_HD bool is_uniform(float u) { return u >= 0.0f && u < 1.0f; }

}  // namespace specdec
