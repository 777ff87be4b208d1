// CUDA's qualifiers and built-in types for a C++ compiler.
#pragma once
#include <cstddef>
#include <cstdint>

#define __global__
#define __device__
#define __host__
#define __grid_constant__
#define __launch_bounds__(...)
#define __forceinline__ inline
#define __noinline__  // libstdc++ uses this name for an attribute: empty is valid there
#define __align__(bytes) __attribute__((aligned(bytes)))

struct uint3 {
  unsigned x, y, z;
};
struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

// The alignment is what a wide load on the device needs; UBSan checks it.
#define SPECDEC_VECTOR2(name, type)         \
  struct __align__(2 * sizeof(type)) name { \
    type x, y;                              \
  };                                        \
  inline constexpr name make_##name(type x, type y) { return {x, y}; }
#define SPECDEC_VECTOR4(name, type)         \
  struct __align__(4 * sizeof(type)) name { \
    type x, y, z, w;                        \
  };                                        \
  inline constexpr name make_##name(type x, type y, type z, type w) { return {x, y, z, w}; }
SPECDEC_VECTOR2(int2, int)
SPECDEC_VECTOR4(int4, int)
SPECDEC_VECTOR4(uint4, unsigned)
SPECDEC_VECTOR4(float4, float)
#undef SPECDEC_VECTOR2
#undef SPECDEC_VECTOR4
