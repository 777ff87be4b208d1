// What "accept" and "residual weight" mean: the one definition that every backend's kernels share.
#pragma once
#include <math.h>
#include <stdint.h>

#include "common/host_device.h"

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
