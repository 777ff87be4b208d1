// The vector code behind every CPU op: one table per instruction set, chosen at first use. All of it works on one tile
// (at most kTile ids), whose floats fit in L1. Files in this folder may include only C headers, intrinsics and
// csrc/common.
#pragma once
#include <stdint.h>

#include "common/law.h"
#include "common/params.h"

namespace specdec::cpu {

constexpr int kMostLanes = 16;  // of a vector
constexpr int kGroup = 64;      // ids whose maximum is kept, so that thresholds are found without reading the row again

// What depends on the dtype of the logits. x points at the first of n <= kTile ids. For rows of float32 weights, the
// weight itself (0 if it is none) times inverse_temperature replaces exp((x - max) * inverse_temperature), and exp_sum
// is infinite if a finite weight is negative.
struct LogitKernels {
  // The maximum of each group of kGroup ids (NaN read as -inf) into out[ceil(n / kGroup)]; returns kNaN if one was seen.
  int32_t (*group_maxima)(const void* x, int n, float* out);
  // sum of exp((x - max) * inverse_temperature)
  float (*exp_sum)(const void* x, int n, float max, float inverse_temperature);
  // sums of e and e * (x - max), where e = exp(x - max)
  void (*moments)(const void* x, int n, float max, float* sum, float* weighted);
  // exp((x - max) * inverse_temperature) * scale where x >= cutoff, else 0
  void (*weights)(const void* x, int n, float max, float inverse_temperature, float cutoff, float scale, float* out);
  // The sum of weights(x, n, max, inverse_temperature, cutoff, 1).
  float (*kept_sum)(const void* x, int n, float max, float inverse_temperature, float cutoff);
  // The values with low <= x < high, and their places, from `first` on, unless null; returns how many. May write kMostLanes more.
  int (*between)(const void* x, int n, float low, float high, int32_t first, int32_t* place, float* value);
  // x as float32, NaN read as -inf
  void (*load)(const void* x, int n, float* out);
  // x as float32; with words -inf where bit i % 32 of word i / 32 is 0. In place where x is float32.
  void (*widen)(const void* x, const int32_t* words, int n, float* out);
  // Replaces each x < cutoff by -inf, but not NaN. A group with a told maximum (unless null) below it has no other.
  void (*mask)(void* x, int n, const float* group_max, float cutoff);
};

constexpr int kOfWeights = 3;

struct Kernels {
  int level;               // 0 portable, 1 AVX2, 2 AVX-512
  LogitKernels logits[4];  // by DType, and kOfWeights
  float (*sum)(const float* x, int n);
  float (*residual_sum)(const float* scaled_p, const float* q, int n);  // sum of (scale * P - Q)+
  float (*overlap_sum)(const float* p, const float* q, int n);          // sum of min(P, Q)
  // Multiplies q by `kept` where logit >= bound, by `other` elsewhere.
  void (*scale_kept)(const float* logit, int n, float bound, float kept, float other, float* q);
  // The ids first .. first + n - 1 whose Gumbel noise may lift exp(score) = weight above exp(best); limit >=
  // exp(-best). Writes their offsets and noise bits, returns how many. A superset: the caller compares exact scores.
  int (*noise_candidates)(int64_t key, int32_t first, int n, const float* weight, float limit, int32_t* offset,
                          uint32_t* bits);
};

extern const Kernels kernels_default;
#if defined(__x86_64__)
extern const Kernels kernels_avx2, kernels_avx512;
#endif

const Kernels& kernels();  // the best table that this processor and the limit set at load allow

}  // namespace specdec::cpu
