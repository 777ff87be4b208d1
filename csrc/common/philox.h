// Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011) and what uses it.
#pragma once
#include <math.h>
#include <stdint.h>

#include "common/host_device.h"

namespace specdec {

struct Words4 {
  uint32_t word[4];
};

// Word i modulo 4, by selection: an index known only at run time would put the words into a GPU's local memory.
SPECDEC_HD uint32_t word_of(const Words4& w, uint32_t i) {
  return i & 2 ? (i & 1 ? w.word[3] : w.word[2]) : (i & 1 ? w.word[1] : w.word[0]);
}

constexpr uint32_t kPhiloxM0 = 0xD2511F53u, kPhiloxM1 = 0xCD9E8D57u;  // multipliers
constexpr uint32_t kPhiloxW0 = 0x9E3779B9u, kPhiloxW1 = 0xBB67AE85u;  // key increments
constexpr int kPhiloxRounds = 10;
constexpr uint32_t kAcceptPurpose = 1, kSamplePurpose = 3;  // as in specdec_kernels/ops/arguments.py
constexpr uint32_t kNoiseStream = 0x47554D42u;              // counter word of the Gumbel stream, which no purpose uses

SPECDEC_HD Words4 philox(uint32_t key0, uint32_t key1, uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3) {
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64_t p0 = uint64_t(kPhiloxM0) * c0, p1 = uint64_t(kPhiloxM1) * c2;
    c0 = uint32_t(p1 >> 32) ^ c1 ^ key0;
    c2 = uint32_t(p0 >> 32) ^ c3 ^ key1;
    c1 = uint32_t(p1);
    c3 = uint32_t(p0);
    key0 += kPhiloxW0;
    key1 += kPhiloxW1;
  }
  return {{c0, c1, c2, c3}};
}

SPECDEC_HD uint32_t low_word(int64_t x) { return uint32_t(uint64_t(x)); }
SPECDEC_HD uint32_t high_word(int64_t x) { return uint32_t(uint64_t(x) >> 32); }

// The index-th uniform of a (seed, step, purpose): a multiple of 2^-53 in [0, 1), made of two words.
SPECDEC_HD double uniform_sample(int64_t seed, int64_t step, uint32_t purpose, uint32_t index) {
  const Words4 w = philox(low_word(seed), high_word(seed), index / 2, purpose, low_word(step), high_word(step));
  const uint64_t bits = index & 1 ? uint64_t(w.word[2]) << 32 | w.word[3] : uint64_t(w.word[0]) << 32 | w.word[1];
  return double(bits >> 11) * 0x1p-53;
}

// The key of the noise at a position.
SPECDEC_HD int64_t noise_key(int64_t seed, int64_t position, int64_t step, uint32_t purpose) {
  const Words4 stream = philox(low_word(seed), high_word(seed), 0, purpose, low_word(step), high_word(step));
  const Words4 bits = philox(stream.word[0], stream.word[1], low_word(position), high_word(position), 1, 1);
  return int64_t(uint64_t(bits.word[0]) | uint64_t(bits.word[1]) << 32);
}

// The 32 bits behind the noise of a target id.
SPECDEC_HD uint32_t noise_bits(int64_t key, uint32_t id) {
  return word_of(philox(low_word(key), high_word(key), id / 4, 0, 0, kNoiseStream), id);
}

// An unlikely id wins with a small t: below this value its bits are too few, and 32 further ones extend them.
constexpr uint32_t kFewBits = 1u << 16;

// The noise of a target id from its bits: G = -log(-log1p(-t)), with t in the middle of [bits, bits + 1) * 2^-32, or of
// the 2^-64 in it that the further bits select. In the upper half 1 - t is computed directly, with all its digits.
SPECDEC_HD float gumbel(int64_t key, uint32_t id, uint32_t bits) {
  if (bits >> 31) return -logf(-logf(float(~bits) * 0x1p-32f + 0x1p-33f));
  float part = 0x1p-33f;
  if (bits < kFewBits) {
    const Words4 further = philox(low_word(key), high_word(key), id / 4, 0, 1, kNoiseStream);
    part = float(word_of(further, id)) * 0x1p-64f + 0x1p-65f;
  }
  return -logf(-log1pf(-(float(bits) * 0x1p-32f + part)));
}

}  // namespace specdec
