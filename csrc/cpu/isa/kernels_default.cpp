// The portable path: lanes as a small array, which the compiler vectorises as well as it can.
#include <math.h>

#include "half_types.h"
#include "kernels.h"

namespace specdec::cpu {
namespace {

struct S {
  static constexpr int N = 8;
  struct F {
    float lane[N];
    friend F operator+(F a, F b) {
      return apply(a, b, [](float x, float y) { return x + y; });
    }
    friend F operator-(F a, F b) {
      return apply(a, b, [](float x, float y) { return x - y; });
    }
    friend F operator*(F a, F b) {
      return apply(a, b, [](float x, float y) { return x * y; });
    }
  };
  template <class Fn>
  static F apply(F a, F b, Fn f) {
    F out;
    for (int i = 0; i < N; ++i) out.lane[i] = f(a.lane[i], b.lane[i]);
    return out;
  }
  using Unordered = bool;
  static Unordered no_nan() { return false; }
  static Unordered note_nan(Unordered seen, F x) {
    for (float v : x.lane) seen |= v != v;
    return seen;
  }
  static bool any_nan(Unordered seen) { return seen; }
  static F load(const float* x) {
    F out;
    memcpy(out.lane, x, sizeof out.lane);
    return out;
  }
  template <class Half>
  static F load(const Half* x) {
    F out;
    for (int i = 0; i < N; ++i) out.lane[i] = to_float(x[i]);
    return out;
  }
  static void store(float* out, F x) { memcpy(out, x.lane, sizeof x.lane); }
  static F set1(float x) {
    F out;
    for (float& v : out.lane) v = x;
    return out;
  }
  static F fma(F a, F b, F c) { return a * b + c; }
  static F max(F a, F b) {
    return apply(a, b, [](float x, float y) { return x > y ? x : y; });
  }
  static F min(F a, F b) {
    return apply(a, b, [](float x, float y) { return x < y ? x : y; });
  }
  static float largest(F a) {  // of lanes without NaN
    for (int step = N / 2; step > 0; step /= 2)
      for (int i = 0; i < step; ++i) a.lane[i] = a.lane[i] > a.lane[i + step] ? a.lane[i] : a.lane[i + step];
    return a.lane[0];
  }
  static F where_ge(F a, F b, F yes, F no) {
    F out;
    for (int i = 0; i < N; ++i) out.lane[i] = a.lane[i] >= b.lane[i] ? yes.lane[i] : no.lane[i];
    return out;
  }
  static F where_bit(uint32_t bits, F yes, F no) {
    F out;
    for (int i = 0; i < N; ++i) out.lane[i] = (bits >> i) & 1 ? yes.lane[i] : no.lane[i];
    return out;
  }
  // Writes the lanes with low <= x < high and their places first, first + 1, … unless null; returns how many.
  static int append(F x, F low, F high, int32_t first, int32_t* place, float* value) {
    int count = 0;
    for (int i = 0; i < N; ++i) {
      if (place) place[count] = first + i;
      value[count] = x.lane[i];
      count += x.lane[i] >= low.lane[i] && x.lane[i] < high.lane[i];
    }
    return count;
  }
  // e * 2^n, where shifted = 1.5 * 2^23 + n holds n in its low bits
  static F scale2(F e, F shifted) {
    F out;
    for (int i = 0; i < N; ++i) {
      uint32_t bits, power;
      memcpy(&bits, &e.lane[i], 4);
      memcpy(&power, &shifted.lane[i], 4);
      out.lane[i] = from_bits(bits + (power << 23));
    }
    return out;
  }
};

}  // namespace
}  // namespace specdec::cpu

#include "tile_kernels.h"

namespace specdec::cpu {
const Kernels kernels_default = make_kernels(0);
}
