// The 16-bit dtypes as bits, and their conversion one at a time.
#pragma once
#include <stdint.h>
#include <string.h>

namespace specdec::cpu {
namespace {

struct BFloat16 {
  static constexpr uint16_t kMinusInfinity = 0xFF80;
  uint16_t bits;
};
struct Float16 {
  static constexpr uint16_t kMinusInfinity = 0xFC00;
  uint16_t bits;
};

[[maybe_unused]] inline float from_bits(uint32_t bits) {
  float f;
  memcpy(&f, &bits, 4);
  return f;
}
[[maybe_unused]] inline float to_float(BFloat16 x) { return from_bits(uint32_t(x.bits) << 16); }
[[maybe_unused]] inline float to_float(Float16 x) {
  const uint32_t sign = uint32_t(x.bits & 0x8000) << 16, magnitude = x.bits & 0x7FFF;
  if (magnitude >= 0x7C00) return from_bits(sign | 0x7F800000u | (magnitude & 0x3FF) << 13);    // infinity, NaN
  if (magnitude < 0x400) return from_bits(sign | 0x3F800000u) * (float(magnitude) * 0x1p-24f);  // subnormal
  return from_bits(sign | ((magnitude << 13) + 0x38000000u));
}

}  // namespace
}  // namespace specdec::cpu
