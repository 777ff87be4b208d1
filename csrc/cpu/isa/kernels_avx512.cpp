#if defined(__x86_64__)
// GCC 12's own headers pass an undefined register to masked built-ins, and warn about it at every inlining.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <immintrin.h>
#include <math.h>

#include "half_types.h"
#include "kernels.h"

namespace specdec::cpu {
namespace {

struct S {
  static constexpr int N = 16;
  using F = __m512;
  using Unordered = __mmask16;
  static Unordered no_nan() { return 0; }
  static Unordered note_nan(Unordered seen, F x) { return seen | _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q); }
  static bool any_nan(Unordered seen) { return seen != 0; }
  static F load(const float* x) { return _mm512_loadu_ps(x); }
  static F load(const BFloat16* x) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
  }
  static F load(const Float16* x) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x))); }
  static void store(float* out, F x) { _mm512_storeu_ps(out, x); }
  static F set1(float x) { return _mm512_set1_ps(x); }
  static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static F max(F a, F b) { return _mm512_max_ps(a, b); }  // b where either is NaN
  static F min(F a, F b) { return _mm512_min_ps(a, b); }
  static float largest(F a) { return _mm512_reduce_max_ps(a); }  // of lanes without NaN
  static F where_ge(F a, F b, F yes, F no) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_GE_OQ), no, yes);
  }
  static F where_bit(uint32_t bits, F yes, F no) { return _mm512_mask_blend_ps(__mmask16(bits), no, yes); }
  // Writes the lanes with low <= x < high and their places first, first + 1, … unless null; returns how many.
  static int append(F x, F low, F high, int32_t first, int32_t* place, float* value) {
    const __mmask16 inside = _mm512_mask_cmp_ps_mask(_mm512_cmp_ps_mask(x, low, _CMP_GE_OQ), x, high, _CMP_LT_OQ);
    _mm512_storeu_ps(value, _mm512_maskz_compress_ps(inside, x));
    if (place) {
      const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
      _mm512_storeu_si512(place, _mm512_maskz_compress_epi32(inside, _mm512_add_epi32(lane, _mm512_set1_epi32(first))));
    }
    return __builtin_popcount(inside);
  }
  // e * 2^n, where shifted = 1.5 * 2^23 + n holds n in its low bits
  static F scale2(F e, F shifted) {
    const __m512i power = _mm512_slli_epi32(_mm512_castps_si512(shifted), 23);
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(e), power));
  }
};

}  // namespace
}  // namespace specdec::cpu

#include "tile_kernels.h"

namespace specdec::cpu {
const Kernels kernels_avx512 = make_kernels(2);
}
#endif
