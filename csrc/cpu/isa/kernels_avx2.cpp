#if defined(__x86_64__)
#include <immintrin.h>
#include <math.h>

#include "half_types.h"
#include "kernels.h"

namespace specdec::cpu {
namespace {

struct S {
  static constexpr int N = 8;
  using F = __m256;
  using Unordered = __m256;
  static Unordered no_nan() { return _mm256_setzero_ps(); }
  static Unordered note_nan(Unordered seen, F x) { return _mm256_or_ps(seen, _mm256_cmp_ps(x, x, _CMP_UNORD_Q)); }
  static bool any_nan(Unordered seen) { return _mm256_movemask_ps(seen) != 0; }
  static F load(const float* x) { return _mm256_loadu_ps(x); }
  static F load(const BFloat16* x) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(x));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
  }
  static F load(const Float16* x) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x))); }
  static void store(float* out, F x) { _mm256_storeu_ps(out, x); }
  static F set1(float x) { return _mm256_set1_ps(x); }
  static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  static F max(F a, F b) { return _mm256_max_ps(a, b); }  // b where either is NaN
  static F min(F a, F b) { return _mm256_min_ps(a, b); }
  static float largest(F a) {  // of lanes without NaN
    __m128 m = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    m = _mm_max_ps(m, _mm_movehl_ps(m, m));
    return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
  }
  static F where_ge(F a, F b, F yes, F no) { return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(a, b, _CMP_GE_OQ)); }
  static F where_bit(uint32_t bits, F yes, F no) {
    const __m256i lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    const __m256i set = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(int(bits)), lane), lane);
    return _mm256_blendv_ps(no, yes, _mm256_castsi256_ps(set));
  }
  // Writes the lanes with low <= x < high and their places first, first + 1, … unless null; returns how many.
  static int append(F x, F low, F high, int32_t first, int32_t* place, float* value) {
    float lane[N];
    store(lane, x);
    int count = 0;
    for (int inside =
             _mm256_movemask_ps(_mm256_and_ps(_mm256_cmp_ps(x, low, _CMP_GE_OQ), _mm256_cmp_ps(x, high, _CMP_LT_OQ)));
         inside != 0; inside &= inside - 1) {
      const int i = __builtin_ctz(inside);
      if (place) place[count] = first + i;
      value[count++] = lane[i];
    }
    return count;
  }
  // e * 2^n, where shifted = 1.5 * 2^23 + n holds n in its low bits
  static F scale2(F e, F shifted) {
    const __m256i power = _mm256_slli_epi32(_mm256_castps_si256(shifted), 23);
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(e), power));
  }
};

}  // namespace
}  // namespace specdec::cpu

#include "tile_kernels.h"

namespace specdec::cpu {
const Kernels kernels_avx2 = make_kernels(1);
}
#endif
