// Arithmetic, loads, stores and atomics, by CUDA's names.
#pragma once
#include <math.h>

#include <cstring>
#include <type_traits>

#include "emulator/runtime.h"

// ---- bits
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x ? __builtin_clz(unsigned(x)) : 32; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return unsigned((uint64_t(high) << 32 | low) >> (shift & 31));
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

// ---- numbers. The conversion saturates, as on the device: in C++ an out-of-range conversion is undefined.
inline unsigned long long __float2ull_rn(float x) {
  constexpr unsigned long long kGreatest = ~0ull;
  if (x != x) return 1ull << 63;
  const float whole = rintf(x);
  if (whole >= float(kGreatest)) return kGreatest;
  return whole > 0.0f ? static_cast<unsigned long long>(whole) : 0;
}

// As on the device: any NaN gives way (in C a signalling one need not), and +0 is greater than -0.
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
SPECDEC_LOAD(__ldcg)
SPECDEC_STORE(__stcg)
#undef SPECDEC_LOAD
#undef SPECDEC_STORE

inline void __threadfence() { specdec::emulator::fence(); }

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
SPECDEC_ATOMIC(atomicMax, old < value ? value : old)
SPECDEC_ATOMIC(atomicOr, old | value)
SPECDEC_ATOMIC(atomicInc, old >= value ? T(0) : old + 1)
#undef SPECDEC_ATOMIC
template <class T>
T atomicExch(T* address, std::type_identity_t<T> value) {
  return specdec::emulator::update_atomically(address, [value](T) { return value; });
}
