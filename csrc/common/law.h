// What "accept" and "residual weight" mean: the one definition that every backend's kernels share.
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

// Token rule: u * Q(x) < P(x), strictly, so that P = 0 is never accepted; a point mass needs no coin.
SPECDEC_HD bool accept_token(float coin, float p, float q) { return coin * q < p; }

// Residual weights (scale * P - Q)+; scale is 1 for the token rule and w for the block rule.
SPECDEC_HD float residual_weight(float scaled_p, float q) { return fmaxf(scaled_p - q, 0.0f); }

// Block rule (Sun et al. 2024, arXiv 2403.10444, algorithm 2): w_i from w_{i-1}.
SPECDEC_HD float next_block_weight(float w, float p, float q) {
  if (!(p > 0.0f) || !(w > 0.0f)) return 0.0f;
  return q > 0.0f ? fminf(1.0f, w * p / q) : 1.0f;
}

// Block rule: the acceptance threshold h_i given w_i and R_i = sum of the residual weights at the next position.
SPECDEC_HD float block_threshold(float w, float residual) {
  const float below = residual + 1.0f - w;
  return below > 0.0f ? residual / below : 1.0f;
}

SPECDEC_HD bool is_uniform(float u) { return u >= 0.0f && u < 1.0f; }

}  // namespace specdec
