// From a row's logits to its law's weights and probabilities.
#pragma once
#include "cuda/load.cuh"

namespace specdec::SPECDEC_CUDA_ROWS {

constexpr float kLog2E = 1.44269504f;

// exp((x - max) * inverse_temperature); 0 for NaN and below kSmallestExponent. A tile's mass, too, is scaled by that of
// its largest x: if that weighs nothing there is nothing to draw, though many such ids may add up to a number.
__device__ __forceinline__ float exp_of(float x, float max, float inverse_temperature) {
  const float exponent = (x - max) * inverse_temperature;
  return exponent >= kSmallestExponent ? fast_exp2(exponent * kLog2E) : 0.0f;
}

// The same where x >= cutoff, else 0.
__device__ __forceinline__ float weight_of(float x, float max, float cutoff, float inverse_temperature) {
  return x >= cutoff ? exp_of(x, max, inverse_temperature) : 0.0f;
}
__device__ __forceinline__ float weight_of(float x, const RowLaw& law) {
  return weight_of(x, law.max, law.cutoff, law.inverse_temperature);
}

// The same times a number, with the law in registers: from shared memory the compiler would reload it for every id.
struct Weight {
  float max, cutoff, inverse_temperature, times;
  __device__ Weight(const RowLaw& law, float times)
      : max(law.max), cutoff(law.cutoff), inverse_temperature(law.inverse_temperature), times(times) {}
  __device__ __forceinline__ float operator()(float x) const {
    return weight_of(x, max, cutoff, inverse_temperature) * times;
  }
};

// The same for a row that may hold weights. Loops over whole rows check law.weights once, outside.
__device__ __forceinline__ float weight_itself(float x, const RowLaw& law) {
  return x >= law.cutoff ? fmaxf(x, 0.0f) * law.inverse_temperature : 0.0f;
}
__device__ __forceinline__ float weight_in(float x, const RowLaw& law) {
  return law.weights ? weight_itself(x, law) : weight_of(x, law);
}

// P of an id whose logit is x.
__device__ __forceinline__ float prob_of(float x, const RowLaw& law, int32_t id) {
  return law.one_hot ? float(id >= 0 && id == law.argmax) : weight_of(x, law) * law.inverse_normalizer;
}

// P of an id whose logit, or weight, is x.
__device__ __forceinline__ float prob_in(float x, const RowLaw& law, int32_t id) {
  if (law.one_hot) return id == law.argmax ? 1.0f : 0.0f;
  return weight_in(x, law) * law.inverse_normalizer;
}

__device__ __forceinline__ float prob_at(const RowView& row, const RowLaw& law, int32_t id) {
  return prob_in(law.one_hot ? 0.0f : logit_at(row, id), law, id);
}

}  // namespace specdec::SPECDEC_CUDA_ROWS
