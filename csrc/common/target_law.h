// Target laws (Narasimhan et al., arXiv 2405.19261): the only place that distinguishes one law from another.
//
// With P, Q the laws after the sampling transform and p, q the raw ones (temperature 1, nothing cut), a position's law is
//   lossless, lossy:  max(min(Q, accept P), scale P), where that sums to 1
//   a cascade:        kept(v) Q(v) + scale P(v)
// and its residual (w law - Q)+ is (w scale P - Q)+, or, where v is kept, (w scale P - (1 - w) Q)+.
#pragma once
#include <math.h>
#include <stdint.h>

#include "common/host_device.h"

namespace specdec {

// The law that verification has to produce, numbered as in specdec_kernels/laws.py.
enum class LawKind : int32_t {
  kLossless = 0,
  kLossy = 1,
  kChow = 2,
  kDiff = 3,
  kOpt = 4,
  kTokenV1 = 5,
  kTokenV2 = 6,
  kTokenV3 = 7,
  kBiLD = 8
};
constexpr int kNumLaws = 9;

struct TargetLaw {
  LawKind kind;
  bool variant;             // kLossy: beta is solved for; kChow, kDiff, kOpt: log loss; kBiLD: of the draft's argmax
  float alpha, rest, beta;  // rest: 1 - alpha, which keeps more digits than float32's alpha near 1
  bool cascade_bonus;       // the bonus has the law too; the draft then has as many rows as the target
};

SPECDEC_HD bool is_cascade(LawKind kind) { return kind >= LawKind::kChow; }

constexpr float kAllKept = -INFINITY, kNoneKept = __builtin_nanf("");  // bounds: no logit is >= NaN

struct Mixture {
  float accept = 1.0f, scale = 1.0f;
  float bound = kNoneKept;  // v is kept iff its logit, in the row that decides, is >= bound ...
  int32_t kept_id = -1;     // ... or, if this is an id, iff it is this one (of the row that decides)
};

// The row that decides is the target's, except for TokenV1: the draft's.
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

// Whether a law looks at the surprise of the draft's argmax under p.
SPECDEC_HD bool asks_surprise_of_argmax(const TargetLaw& law) { return law.kind == LawKind::kBiLD && law.variant; }

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

// A position's mixture as far as it is known without a measure, and which measure it needs. `surprise_q`: the surprise
// of the draft's argmax under p (BiLD's second distance). Raw rows matter for cascades only.
SPECDEC_HD Mixture begin_mixture(const TargetLaw& law, const RawRow& p, const RawRow& q, float surprise_q,
                                 Measure* measure) {
  Mixture mixture{};
  *measure = Measure::kNothing;
  switch (law.kind) {
    case LawKind::kLossless:
      break;
    case LawKind::kLossy:
      mixture.accept = 1.0f / law.rest;
      mixture.scale = 1.0f / law.beta;
      if (law.variant) *measure = Measure::kLossyScale;
      break;
    case LawKind::kChow:
      set_deferral(mixture, law.variant ? q.entropy > law.alpha : q.max_prob < law.rest);
      break;
    case LawKind::kDiff:
      set_deferral(mixture, deferral_gain(law, p, q) > law.alpha);
      break;
    case LawKind::kOpt: {
      const float gain = deferral_gain(law, p, q);
      set_deferral(mixture, gain > law.alpha);
      // TV is in [0, 1], so it decides only if the gain is between 0 and alpha
      if (gain > fminf(law.alpha, 0.0f) && gain <= fmaxf(law.alpha, 0.0f)) *measure = Measure::kTotalVariation;
      break;
    }
    case LawKind::kTokenV1:
    case LawKind::kTokenV2:
    case LawKind::kTokenV3:
      keep_from(mixture, law.kind == LawKind::kTokenV3 ? law.rest * p.max_prob : p.max_prob - law.alpha,
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

// Whether a measure decides which ids are kept, not only the scale of P.
SPECDEC_HD bool decides_kept(Measure measure) {
  return measure == Measure::kTotalVariation || measure == Measure::kCrossEntropy;
}

// Completes a mixture from the sum of its measure.
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

}  // namespace specdec
