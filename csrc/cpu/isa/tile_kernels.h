// The tile kernels, written once over `struct S`, which each file of this folder defines first in an anonymous namespace:
// S::N lanes of float in S::F, with load (of each dtype), store, set1, fma, max, min, largest, where_ge, where_bit, append,
// scale2; no_nan, note_nan and any_nan on S::Unordered.
// Everything has internal linkage: see common/host_device.h.
#include <math.h>
#include <string.h>

#include "common/philox.h"
#include "common/status.h"
#include "kernels.h"

namespace specdec::cpu {
namespace {

using F = S::F;
constexpr int N = S::N;

// exp(x) for x <= 0, within 2 units in the last place; exactly 0 below kSmallestExponent and for NaN.
// x = n ln 2 + r, |r| <= ln 2 / 2; exp(r) = 1 + r + r^2 g(r), g minimax of degree 4 (relative error 3e-9); 2^n by exponent.
inline F exp_nonpositive(F x) {
  const F magic = S::set1(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const F shifted = S::fma(x, S::set1(1.44269504f), magic);
  const F n = shifted - magic;
  F r = S::fma(n, S::set1(-0.693359375f), x);  // ln 2 in two parts, the first exact in few bits
  r = S::fma(n, S::set1(2.12194440e-4f), r);
  F g = S::set1(1.381459878757596e-3f);
  g = S::fma(g, r, S::set1(8.368716575205326e-3f));
  g = S::fma(g, r, S::set1(4.166838899254799e-2f));
  g = S::fma(g, r, S::set1(1.666652113199234e-1f));
  g = S::fma(g, r, S::set1(4.999999403953552e-1f));
  const F e = S::fma(r * r, g, r) + S::set1(1.0f);
  return S::where_ge(x, S::set1(kSmallestExponent), S::scale2(e, shifted), S::set1(0.0f));
}

inline float horizontal_sum(F x) {  // pairwise, so that lanes combine alike for every width
  float lane[N];
  S::store(lane, x);
  for (int step = N / 2; step > 0; step /= 2)
    for (int i = 0; i < step; ++i) lane[i] += lane[i + step];
  return lane[0];
}

// Prefetches the `numbers` from x on: loads of an uncached row stall at each new page, and the next tile can arrive
// while this one is weighed. May lie beyond the row: no address is bad.
template <class T>
inline void fetch(const T* x, int numbers) {
  constexpr int kLine = 64 / sizeof(T);
  for (int i = 0; i < numbers; i += kLine) __builtin_prefetch(x + i, 0, 2);
}

// Calls f(vector, offset) over n values; the last, partial vector is filled up with `fill`.
template <class T, class Fn>
inline void for_each(const T* x, int n, T fill, Fn f) {
  int i = 0;
  for (; i + N <= n; i += N) f(S::load(x + i), i);
  if (i < n) {
    T rest[N];
    for (int k = 0; k < N; ++k) rest[k] = i + k < n ? x[i + k] : fill;
    f(S::load(rest), i);
  }
}

template <class T>
constexpr T minus_infinity() {
  if constexpr (sizeof(T) == 4)
    return -INFINITY;
  else
    return T{T::kMinusInfinity};
}

inline void store_some(float* out, F x, int count) {
  if (count >= N) {
    S::store(out, x);
  } else {
    float lane[N];
    S::store(lane, x);
    memcpy(out, lane, sizeof(float) * count);
  }
}

template <class T>
int32_t group_maxima(const void* data, int n, float* out) {
  const T* x = static_cast<const T*>(data);
  typename S::Unordered nan = S::no_nan();
  int i = 0;
  for (; i + kGroup <= n; i += kGroup) {
    fetch(x + i + kTile / 2, kGroup);
    F m = S::set1(-INFINITY);
    for (int k = 0; k < kGroup; k += N) {
      const F v = S::load(x + i + k);
      nan = S::note_nan(nan, v);
      m = S::max(v, m);  // the second operand where v is NaN
    }
    *out++ = S::largest(m);
  }
  if (i < n) {
    F m = S::set1(-INFINITY);
    for_each(x + i, n - i, minus_infinity<T>(), [&](F v, int) {
      nan = S::note_nan(nan, v);
      m = S::max(v, m);
    });
    *out = S::largest(m);
  }
  return S::any_nan(nan) ? kNaN : 0;
}

// exp((v - m) * t), or v * t for weights.
template <bool kWeights>
inline F weight_of(F v, F m, F t) {
  if constexpr (kWeights)
    return S::max(v, S::set1(0.0f)) * t;  // the second operand where v is NaN
  else
    return exp_nonpositive((v - m) * t);
}

template <class T, bool kWeights = false>
float exp_sum(const void* data, int n, float max, float inverse_temperature) {
  const T* x = static_cast<const T*>(data);
  const F m = S::set1(max), t = S::set1(inverse_temperature), zero = S::set1(0.0f);
  const F infinity = S::set1(INFINITY), lowest = S::set1(-3.40282347e38f);
  const auto weight = [&](F v) {
    if constexpr (kWeights)
      return S::where_ge(v, zero, v * t, S::where_ge(v, lowest, infinity, zero));
    else
      return exp_nonpositive((v - m) * t);
  };
  F s0 = zero, s1 = zero;
  int i = 0;
  for (; i + 2 * N <= n; i += 2 * N) {
    fetch(x + i + kTile, 2 * N);
    s0 = s0 + weight(S::load(x + i));
    s1 = s1 + weight(S::load(x + i + N));
  }
  for_each(x + i, n - i, minus_infinity<T>(), [&](F v, int) { s0 = s0 + weight(v); });
  return horizontal_sum(s0 + s1);
}

template <class T>
void moments(const void* data, int n, float max, float* sum, float* weighted) {
  const F m = S::set1(max), zero = S::set1(0.0f);
  F s = zero, w = zero;
  for_each(static_cast<const T*>(data), n, minus_infinity<T>(), [&](F v, int) {
    const F shifted = v - m, e = exp_nonpositive(shifted);
    s = s + e;
    w = w + S::where_ge(shifted, S::set1(kSmallestExponent), e * shifted, zero);  // 0 * log 0 = 0
  });
  *sum = horizontal_sum(s);
  *weighted = horizontal_sum(w);
}

// Stats of another row may claim a max that is too small: such a logit weighs at most exp(88), as 2^n would wrap.
template <class T, bool kWeights = false>
void weights(const void* data, int n, float max, float inverse_temperature, float cutoff, float scale, float* out) {
  const F m = S::set1(max), t = S::set1(inverse_temperature), c = S::set1(cutoff), f = S::set1(scale),
          zero = S::set1(0.0f);
  const F most = S::set1(88.0f);
  const auto weight = [&](F v) {
    if constexpr (kWeights)
      return weight_of<true>(v, m, t);
    else
      return exp_nonpositive(S::min(most, (v - m) * t));  // the second operand where that is NaN
  };
  const T* x = static_cast<const T*>(data);
  for_each(x, n, minus_infinity<T>(), [&](F v, int i) {
    fetch(x + i + kTile, N);
    store_some(out + i, S::where_ge(v, c, weight(v) * f, zero), n - i);
  });
}

template <class T, bool kWeights = false>
float kept_sum(const void* data, int n, float max, float inverse_temperature, float cutoff) {
  const T* x = static_cast<const T*>(data);
  const F m = S::set1(max), t = S::set1(inverse_temperature), c = S::set1(cutoff), zero = S::set1(0.0f);
  const auto weight = [&](F v) { return S::where_ge(v, c, weight_of<kWeights>(v, m, t), zero); };
  F s0 = zero, s1 = zero;
  int i = 0;
  for (; i + 2 * N <= n; i += 2 * N) {
    fetch(x + i + kTile, 2 * N);
    s0 = s0 + weight(S::load(x + i));
    s1 = s1 + weight(S::load(x + i + N));
  }
  for_each(x + i, n - i, minus_infinity<T>(), [&](F v, int) { s0 = s0 + weight(v); });
  return horizontal_sum(s0 + s1);
}

template <class T>
int between(const void* data, int n, float low, float high, int32_t first, int32_t* place, float* value) {
  const F from = S::set1(low), to = S::set1(high);
  int count = 0;
  for_each(static_cast<const T*>(data), n, minus_infinity<T>(), [&](F v, int i) {
    count += S::append(v, from, to, first + i, place ? place + count : nullptr, value + count);
  });
  return count;
}

template <class T>
void load(const void* data, int n, float* out) {
  const F low = S::set1(-INFINITY);
  for_each(static_cast<const T*>(data), n, minus_infinity<T>(),
           [&](F v, int i) { store_some(out + i, S::max(v, low), n - i); });
}

template <class T>
void widen(const void* data, const int32_t* words, int n, float* out) {
  const T* x = static_cast<const T*>(data);
  if (words == nullptr) return for_each(x, n, minus_infinity<T>(), [&](F v, int i) { store_some(out + i, v, n - i); });
  const F low = S::set1(-INFINITY);
  int whole = 0;
  for (; whole + 32 <= n; whole += 32) {
    // Prefetches the next tile: between stores, loads from memory do not run as far ahead as those of a scan.
    __builtin_prefetch(x + whole + kTile);
    __builtin_prefetch(x + whole + kTile + 16);
    if (whole % 512 == 0) __builtin_prefetch(words + (whole + kTile) / 32);
    const uint32_t word = uint32_t(words[whole / 32]);
    for (int k = 0; k < 32; k += N) S::store(out + whole + k, S::where_bit(word >> k, S::load(x + whole + k), low));
  }
  for_each(x + whole, n - whole, minus_infinity<T>(), [&](F v, int i) {
    const uint32_t word = uint32_t(words[whole / 32]);
    store_some(out + whole + i, S::where_bit(word >> i, v, low), n - whole - i);
  });
}

template <class T>
void mask(void* data, int n, const float* group_max, float cutoff) {
  const F c = S::set1(cutoff), no = S::set1(0.0f), yes = S::set1(1.0f);
  for (int first = 0; first < n; first += kGroup) {
    T* const x = static_cast<T*>(data) + first;
    const int count = n - first < kGroup ? n - first : kGroup;
    if (group_max && group_max[first / kGroup] < cutoff) {
      for (int i = 0; i < count; ++i) x[i] = minus_infinity<T>();
      continue;
    }
    float cut[kGroup];
    F any = no;
    for_each(x, count, minus_infinity<T>(), [&](F v, int i) {
      const F lower = S::where_ge(v, c, no, S::where_ge(c, v, yes, no));  // neither for NaN
      any = S::max(any, lower);
      store_some(cut + i, lower, count - i);
    });
    if (!(S::largest(any) > 0.0f)) continue;
    for (int i = 0; i < count; ++i) x[i] = cut[i] > 0.0f ? minus_infinity<T>() : x[i];
  }
}

inline float sum(const float* x, int n) {
  F s = S::set1(0.0f);
  for_each(x, n, 0.0f, [&](F v, int) { s = s + v; });
  return horizontal_sum(s);
}

// Calls f(a, b) over two arrays of n values, filled up with zeros.
template <class Fn>
inline float pairwise_sum(const float* a, const float* b, int n, Fn f) {
  F s0 = S::set1(0.0f), s1 = s0;
  int i = 0;
  for (; i + 2 * N <= n; i += 2 * N) {
    s0 = s0 + f(S::load(a + i), S::load(b + i));
    s1 = s1 + f(S::load(a + i + N), S::load(b + i + N));
  }
  for (; i < n; i += N) {
    float ra[N] = {}, rb[N] = {};
    memcpy(ra, a + i, sizeof(float) * (n - i < N ? n - i : N));
    memcpy(rb, b + i, sizeof(float) * (n - i < N ? n - i : N));
    s0 = s0 + f(S::load(ra), S::load(rb));
  }
  return horizontal_sum(s0 + s1);
}

float residual_sum(const float* scaled_p, const float* q, int n) {
  return pairwise_sum(scaled_p, q, n, [](F p, F d) { return S::max(p - d, S::set1(0.0f)); });
}

float overlap_sum(const float* p, const float* q, int n) {
  return pairwise_sum(p, q, n, [](F a, F b) { return S::min(a, b); });
}

void scale_kept(const float* logit, int n, float bound, float kept, float other, float* q) {
  const F b = S::set1(bound), yes = S::set1(kept), no = S::set1(other);
  for_each(logit, n, -INFINITY, [&](F v, int i) {
    float factor[N];
    S::store(factor, S::where_ge(v, b, yes, no));
    for (int k = 0; k < N && i + k < n; ++k) q[i + k] *= factor[k];
  });
}

// Philox for 16 counters at once as plain loops, which the compiler turns into this instruction set's vectors.
struct Noise64 {
  uint32_t word[4][16];
};

inline void philox64(int64_t key, uint32_t counter, Noise64& out) {
  uint32_t c0[16], c1[16], c2[16], c3[16];
  for (int i = 0; i < 16; ++i) c0[i] = counter + i, c1[i] = 0, c2[i] = 0, c3[i] = kNoiseStream;
  uint32_t k0 = low_word(key), k1 = high_word(key);
  for (int round = 0; round < kPhiloxRounds; ++round) {
    for (int i = 0; i < 16; ++i) {
      const uint64_t p0 = uint64_t(kPhiloxM0) * c0[i], p1 = uint64_t(kPhiloxM1) * c2[i];
      c0[i] = uint32_t(p1 >> 32) ^ c1[i] ^ k0;
      c2[i] = uint32_t(p0 >> 32) ^ c3[i] ^ k1;
      c1[i] = uint32_t(p1);
      c3[i] = uint32_t(p0);
    }
    k0 += kPhiloxW0;
    k1 += kPhiloxW1;
  }
  memcpy(out.word[0], c0, sizeof c0);
  memcpy(out.word[1], c1, sizeof c1);
  memcpy(out.word[2], c2, sizeof c2);
  memcpy(out.word[3], c3, sizeof c3);
}

// A candidate's t = bits * 2^-32 must be at most weight * limit: as -log1p(-t) >= t, only then can that be, too.
int noise_candidates(int64_t key, int32_t first, int n, const float* weight, float limit, int32_t* offset,
                     uint32_t* bits) {
  int count = 0;
  Noise64 noise;
  for (int i = 0; i < n; i += 64) {  // a tile starts at a multiple of 64 ids
    philox64(key, uint32_t(first + i) / 4, noise);
    for (int k = 0; k < 64 && i + k < n; ++k) {
      const uint32_t word = noise.word[k % 4][k / 4];
      offset[count] = i + k;
      bits[count] = word;
      count += float(word) * 0x1p-32f <= weight[i + k] * limit && weight[i + k] > 0.0f;
    }
  }
  return count;
}

template <class T, bool kWeights = false>
constexpr LogitKernels logit_kernels() {
  return {group_maxima<T>,
          exp_sum<T, kWeights>,
          moments<T>,
          weights<T, kWeights>,
          kept_sum<T, kWeights>,
          between<T>,
          load<T>,
          widen<T>,
          mask<T>};
}

constexpr Kernels make_kernels(int level) {
  return {level,
          {logit_kernels<float>(), logit_kernels<BFloat16>(), logit_kernels<Float16>(), logit_kernels<float, true>()},
          sum,
          residual_sum,
          overlap_sum,
          scale_kept,
          noise_candidates};
}

}  // namespace
}  // namespace specdec::cpu
