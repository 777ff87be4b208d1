// Arithmetic, loads, stores and atomics, by CUDA's names.
#pragma once
#include <math.h>

#include <cstring>
#include <type_traits>

#include "emulator/runtime.h"

// ---- bits
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz(unsigned(x)) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll(static_cast<unsigned long long>(x)) : 64; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline unsigned __brev(unsigned x) {
  unsigned reversed = 0;
  for (int i = 0; i < 32; ++i) reversed |= (x >> i & 1u) << (31 - i);
  return reversed;
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return unsigned((uint64_t(high) << 32 | low) >> (shift & 31));
}
inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned(uint64_t(a) * b >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  __extension__ typedef unsigned __int128 Wide;
  return static_cast<unsigned long long>(Wide(a) * b >> 64);
}

template <class To, class From>
To specdec_bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}
inline unsigned __float_as_uint(float x) { return specdec_bit_cast<unsigned>(x); }
inline int __float_as_int(float x) { return specdec_bit_cast<int>(x); }
inline float __uint_as_float(unsigned x) { return specdec_bit_cast<float>(x); }
inline float __int_as_float(int x) { return specdec_bit_cast<float>(x); }
inline long long __double_as_longlong(double x) { return specdec_bit_cast<long long>(x); }
inline double __longlong_as_double(long long x) { return specdec_bit_cast<double>(x); }

// ---- numbers. Conversions saturate, as on the device: in C++ what is out of range has no value.
template <class To, class From>
To specdec_saturate(From x) {
  constexpr To kLeast = std::is_signed_v<To> ? To(To(1) << (8 * sizeof(To) - 1)) : To(0), kGreatest = To(~kLeast);
  if (!(x == x)) return sizeof(To) == 8 ? To(To(1) << 63) : To(0);
  if (x <= From(kLeast)) return kLeast;
  if (x >= From(kGreatest)) return kGreatest;
  return To(x);
}
inline int __float2int_rn(float x) { return specdec_saturate<int>(rintf(x)); }
inline int __float2int_rd(float x) { return specdec_saturate<int>(floorf(x)); }
inline int __float2int_ru(float x) { return specdec_saturate<int>(ceilf(x)); }
inline int __float2int_rz(float x) { return specdec_saturate<int>(truncf(x)); }
inline unsigned __float2uint_rn(float x) { return specdec_saturate<unsigned>(rintf(x)); }
inline unsigned __float2uint_rd(float x) { return specdec_saturate<unsigned>(floorf(x)); }
inline unsigned __float2uint_ru(float x) { return specdec_saturate<unsigned>(ceilf(x)); }
inline unsigned __float2uint_rz(float x) { return specdec_saturate<unsigned>(truncf(x)); }
inline long long __float2ll_rn(float x) { return specdec_saturate<long long>(rintf(x)); }
inline unsigned long long __float2ull_rn(float x) { return specdec_saturate<unsigned long long>(rintf(x)); }
inline unsigned long long __float2ull_rd(float x) { return specdec_saturate<unsigned long long>(floorf(x)); }
inline unsigned long long __float2ull_ru(float x) { return specdec_saturate<unsigned long long>(ceilf(x)); }
inline unsigned long long __float2ull_rz(float x) { return specdec_saturate<unsigned long long>(truncf(x)); }
inline long long __double2ll_rn(double x) { return specdec_saturate<long long>(rint(x)); }
inline unsigned long long __double2ull_rn(double x) { return specdec_saturate<unsigned long long>(rint(x)); }
inline unsigned long long __double2ull_rd(double x) { return specdec_saturate<unsigned long long>(floor(x)); }
inline unsigned long long __double2ull_ru(double x) { return specdec_saturate<unsigned long long>(ceil(x)); }
inline unsigned long long __double2ull_rz(double x) { return specdec_saturate<unsigned long long>(trunc(x)); }
inline float __int2float_rn(int x) { return float(x); }
inline float __uint2float_rn(unsigned x) { return float(x); }
inline float __ll2float_rn(long long x) { return float(x); }
inline float __ull2float_rn(unsigned long long x) { return float(x); }
inline double __ull2double_rn(unsigned long long x) { return double(x); }
inline float __double2float_rn(double x) { return float(x); }

inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __fdividef(float a, float b) { return a / b; }
// The device's fast functions go through powers and logarithms of 2, and so do these.
inline float __expf(float x) { return exp2f(x * 1.44269504f); }
inline float __logf(float x) { return log2f(x) * 0.693147181f; }
inline float __log2f(float x) { return log2f(x); }

// As the device: any NaN gives way (in C a signalling one may not), and +0 is greater than -0.
namespace specdec::cuda {
inline float fmaxf(float a, float b) {
  if (a != a || a < b) return b;
  return a == b && signbit(a) ? b : a;
}
inline float fminf(float a, float b) {
  if (a != a || b < a) return b;
  return a == b && signbit(b) ? b : a;
}
}  // namespace specdec::cuda
inline float max(float a, float b) { return specdec::cuda::fmaxf(a, b); }
inline float min(float a, float b) { return specdec::cuda::fminf(a, b); }
inline double max(double a, double b) { return fmax(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
#define SPECDEC_MIN_MAX(type)                               \
  inline type max(type a, type b) { return a < b ? b : a; } \
  inline type min(type a, type b) { return b < a ? b : a; }
SPECDEC_MIN_MAX(int)
SPECDEC_MIN_MAX(unsigned)
SPECDEC_MIN_MAX(long)
SPECDEC_MIN_MAX(unsigned long)
SPECDEC_MIN_MAX(long long)
SPECDEC_MIN_MAX(unsigned long long)
#undef SPECDEC_MIN_MAX

// ---- memory. Wide accesses must be aligned on the device; here only UBSan would notice.
namespace specdec::emulator {
inline void check_aligned(const void* address, size_t alignment, const char* what, Site site) {
  if (reinterpret_cast<uintptr_t>(address) % alignment != 0) {
    fail(what, site, "the address is no multiple of " + std::to_string(alignment));
  }
}
}  // namespace specdec::emulator

#define SPECDEC_LOAD(name)                                                                   \
  template <class T>                                                                         \
  T name(const T* address, specdec::emulator::Site site = specdec::emulator::Site::here()) { \
    specdec::emulator::check_aligned(address, alignof(T), #name, site);                      \
    specdec::emulator::count_load(sizeof(T));                                                \
    return *address;                                                                         \
  }
#define SPECDEC_STORE(name)                                                   \
  template <class T>                                                          \
  void name(T* address, std::type_identity_t<T> value,                        \
            specdec::emulator::Site site = specdec::emulator::Site::here()) { \
    specdec::emulator::check_aligned(address, alignof(T), #name, site);       \
    *address = value;                                                         \
  }
SPECDEC_LOAD(__ldg)
SPECDEC_LOAD(__ldcs)
SPECDEC_LOAD(__ldcg)
SPECDEC_LOAD(__ldca)
SPECDEC_LOAD(__ldlu)
SPECDEC_LOAD(__ldcv)
SPECDEC_STORE(__stcs)
SPECDEC_STORE(__stcg)
SPECDEC_STORE(__stwb)
SPECDEC_STORE(__stwt)
#undef SPECDEC_LOAD
#undef SPECDEC_STORE

inline void __threadfence() { specdec::emulator::fence(); }
inline void __threadfence_block() {}  // orders nothing between blocks, and within one only what a barrier orders too

// ---- atomics: relaxed, as on the device
namespace specdec::emulator {
template <class T, class Update>
T update_atomically(T* address, Update update) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8);
  using Bits = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;
  atomic_point(address);
  Bits* bits = reinterpret_cast<Bits*>(address);
  Bits old = __atomic_load_n(bits, __ATOMIC_RELAXED);
  while (!__atomic_compare_exchange_n(bits, &old, specdec_bit_cast<Bits>(update(specdec_bit_cast<T>(old))), false,
                                      __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
  atomic_done(address);
  return specdec_bit_cast<T>(old);
}
}  // namespace specdec::emulator

#define SPECDEC_ATOMIC(name, expression)                                                            \
  template <class T>                                                                                \
  T name(T* address, std::type_identity_t<T> value) {                                               \
    return specdec::emulator::update_atomically(address, [value](T old) { return T(expression); }); \
  }
SPECDEC_ATOMIC(atomicAdd, old + value)
SPECDEC_ATOMIC(atomicSub, old - value)
SPECDEC_ATOMIC(atomicMax, old < value ? value : old)
SPECDEC_ATOMIC(atomicMin, value < old ? value : old)
SPECDEC_ATOMIC(atomicAnd, old& value)
SPECDEC_ATOMIC(atomicOr, old | value)
SPECDEC_ATOMIC(atomicXor, old ^ value)
SPECDEC_ATOMIC(atomicInc, old >= value ? T(0) : old + 1)
SPECDEC_ATOMIC(atomicDec, old == 0 || old > value ? value : old - 1)
#undef SPECDEC_ATOMIC
template <class T>
T atomicExch(T* address, std::type_identity_t<T> value) {
  return specdec::emulator::update_atomically(address, [value](T) { return value; });
}
template <class T>
T atomicCAS(T* address, std::type_identity_t<T> expected, std::type_identity_t<T> value) {
  return specdec::emulator::update_atomically(address, [=](T old) { return old == expected ? value : old; });
}
