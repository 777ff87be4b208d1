// Random small cases of every op: inputs in buffers of their exact size, and what a backend makes of them.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include "common/ops.h"
#include "common/params.h"

namespace specdec::tests {

#define SPECDEC_CALL(Name, op) std::function<void(const Name##Args&)> op;
struct Backend {
  SPECDEC_OPS(SPECDEC_CALL)
};
#undef SPECDEC_CALL

// The op's outputs, one string of bytes each; backends must agree on the first: tokens and counts.
using Outputs = std::vector<std::string>;

struct Case {
  std::string name;
  std::function<Outputs(const Backend&)> run;
  bool at_border = false;  // a draw so close to a border that backends may differ
};

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9E3779B97F4A7C15ull + 1) {}
  uint64_t bits() {  // splitmix64
    uint64_t z = state_ += 0x9E3779B97F4A7C15ull;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ z >> 27) * 0x94D049BB133111EBull;
    return z ^ z >> 31;
  }
  int64_t below(int64_t n) { return int64_t(bits() % uint64_t(n)); }
  bool chance(double p) { return uniform() < p; }
  float uniform() { return float(bits() >> 40) * 0x1p-24f; }
  float normal() { return std::sqrt(-2.0f * std::log(1.0f - uniform())) * std::cos(6.2831853f * uniform()); }
  template <class T>
  T pick(std::initializer_list<T> choices) {
    return choices.begin()[below(int64_t(choices.size()))];
  }

 private:
  uint64_t state_;
};

// Rows of logits in one of the dtypes, at any alignment, with as little room around them as possible.
struct RowBuffer {
  std::vector<unsigned char> bytes;
  Rows rows{};
};

inline uint16_t to_half_bits(float x, bool bfloat16) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if (bfloat16) return uint16_t(bits >> 16);
  const uint32_t sign = bits >> 16 & 0x8000, magnitude = bits & 0x7FFFFFFF;
  if (magnitude >= 0x7F800000) return uint16_t(sign | 0x7C00 | (magnitude > 0x7F800000 ? 1 : 0));
  if (magnitude < 0x38800000) return uint16_t(sign);  // small ones become 0
  return uint16_t(sign | (magnitude - 0x38000000) >> 13);
}

// values: [batch * n, vocab].
inline std::shared_ptr<RowBuffer> make_rows(Random& random, const std::vector<float>& values, int64_t batch, int64_t n,
                                            int32_t vocab, DType dtype) {
  auto buffer = std::make_shared<RowBuffer>();
  const int64_t size = dtype == DType::kFloat32 ? 4 : 2, first = random.pick({0, 0, 1, 3, 8});
  const int64_t stride = vocab + random.pick({0, 0, 1, 5}), count = batch * n;
  buffer->bytes.resize(size_t(first + (count > 0 ? (count - 1) * stride + vocab : 0)) * size);
  for (int64_t row = 0; row < count; ++row) {
    for (int64_t v = 0; v < vocab; ++v) {
      unsigned char* at = buffer->bytes.data() + (first + row * stride + v) * size;
      const float x = values[row * vocab + v];
      const uint16_t half = to_half_bits(x, dtype == DType::kBFloat16);
      std::memcpy(at, size == 4 ? static_cast<const void*>(&x) : &half, size);
    }
  }
  buffer->rows = {buffer->bytes.data() + first * size, dtype, vocab, n * stride, stride};
  return buffer;
}

inline std::vector<float> make_values(Random& random, int64_t rows, int32_t vocab) {
  std::vector<float> values(rows * vocab);
  for (int64_t row = 0; row < rows; ++row) {
    const float spread = random.pick({0.5f, 2.0f, 4.0f}), grid = random.pick({0.0f, 0.0f, 0.5f});
    float* x = values.data() + row * vocab;
    for (int32_t v = 0; v < vocab; ++v) {
      x[v] = spread * random.normal();
      if (grid > 0.0f) x[v] = grid * std::round(x[v] / grid);  // ties
    }
    constexpr float kInfinity = std::numeric_limits<float>::infinity();
    if (random.chance(0.2)) {
      for (int32_t v = 0; v < vocab; ++v) {
        if (random.chance(0.5)) x[v] = -kInfinity;
      }
    }
    if (random.chance(0.05)) x[random.below(vocab)] = kInfinity;
    if (random.chance(0.05)) x[random.below(vocab)] = std::numeric_limits<float>::quiet_NaN();
    if (random.chance(0.03)) std::fill(x, x + vocab, -kInfinity);
  }
  return values;
}

constexpr double kLastUniform = 1.0 - 0x1p-53;  // a draw with it may overrun the masses

// Of either width.
struct UniformBuffer {
  std::vector<double> wide;
  std::vector<float> narrow;

  Uniforms given() const {
    if (!narrow.empty()) return {narrow.data(), false};
    return {wide.empty() ? nullptr : wide.data(), true};
  }
};

inline UniformBuffer make_uniforms(Random& random, int64_t count) {
  UniformBuffer u;
  for (int64_t i = 0; i < count; ++i)
    u.wide.push_back(random.chance(0.05) ? random.pick({0.0, kLastUniform, 2.0}) : random.uniform());
  if (random.chance(0.3)) {
    u.narrow.assign(u.wide.begin(), u.wide.end());
    u.wide.clear();
  }
  return u;
}

// Sampling parameters and the arrays behind them.
struct ParamsBuffer {
  std::vector<float> temperatures, top_ps, min_ps;
  std::vector<int64_t> top_ks;
  SamplingArgs args{1.0f, 0, 1.0f, 0.0f, false, nullptr, nullptr, nullptr, nullptr};
};

inline std::shared_ptr<ParamsBuffer> make_params(Random& random, int64_t batch, int32_t vocab) {
  auto p = std::make_shared<ParamsBuffer>();
  const auto temperature = [&] { return random.pick({1.0f, 1.0f, 0.7f, 1.5f, 0.0f}); };
  const auto top_k = [&] { return random.chance(0.3) ? 1 + random.below(vocab + 2) : 0; };
  const auto top_p = [&] { return random.chance(0.3) ? 0.05f + 0.95f * random.uniform() : 1.0f; };
  const auto min_p = [&] { return random.chance(0.2) ? 0.3f * random.uniform() : 0.0f; };
  p->args.min_p_first = random.chance(0.3);
  if (random.chance(0.5)) {
    for (int64_t b = 0; b < batch; ++b) {
      p->temperatures.push_back(temperature());
      p->top_ks.push_back(top_k());
      p->top_ps.push_back(top_p());
      p->min_ps.push_back(min_p());
    }
    p->args.temperatures = p->temperatures.data();
    p->args.top_ks = p->top_ks.data();
    p->args.top_ps = p->top_ps.data();
    p->args.min_ps = p->min_ps.data();
  } else {
    p->args.temperature = temperature();
    p->args.top_k = top_k();
    p->args.top_p = top_p();
    p->args.min_p = min_p();
  }
  return p;
}

// Logits processors and the lists behind them.
struct ProcessorsBuffer {
  std::vector<int32_t> bitmask, allowed, bias_ids, bias_until, count_ids, counts, num_output;
  std::vector<float> bias_values, penalties;
  ProcessorArgs args{};
};

// Processors of sequences that have `rows` rows of target logits in all; mostly none.
inline std::shared_ptr<ProcessorsBuffer> make_processors(Random& random, int64_t batch, int64_t rows, int32_t vocab) {
  auto p = std::make_shared<ProcessorsBuffer>();
  if (random.chance(0.6)) return p;
  p->args.on = true;
  p->args.words = (vocab + 31) / 32;
  const int64_t lists = random.chance(0.5) ? 1 : batch;
  const auto list = [&](const auto& values) {
    const int64_t width = int64_t(values.size()) / lists;
    return Lists<typename std::decay_t<decltype(values)>::value_type>{values.data(), width, lists == 1 ? 0 : width};
  };
  const auto words = [&](int64_t count) {  // three bits in four
    std::vector<int32_t> made(count);
    for (int32_t& word : made) word = int32_t(random.bits() | random.bits());
    return made;
  };
  const auto ids = [&](int64_t width) {  // each once and in order, or (seldom) in no order
    std::vector<int32_t> made;
    for (int64_t b = 0; b < lists; ++b) {
      std::vector<int32_t> one(width);
      for (int32_t& id : one) id = int32_t(random.below(vocab + 6)) - 2;
      if (!random.chance(0.05)) {
        std::sort(one.begin(), one.end());
        one.erase(std::unique(one.begin(), one.end()), one.end());
        one.resize(width, std::numeric_limits<int32_t>::max());
      }
      made.insert(made.end(), one.begin(), one.end());
    }
    return made;
  };
  if (random.chance(0.5)) {
    p->bitmask = words(rows * p->args.words);
    p->args.bitmask = p->bitmask.data();
  }
  if (random.chance(0.3)) {
    p->allowed = words(lists * p->args.words);
    p->args.allowed = list(p->allowed);
  }
  if (random.chance(0.6)) {
    p->bias_ids = ids(random.pick({1, 5, 40, 1500}));
    for (size_t i = 0; i < p->bias_ids.size(); ++i) {
      p->bias_values.push_back(random.chance(0.2) ? -std::numeric_limits<float>::infinity() : 2.0f * random.normal());
      p->bias_until.push_back(int32_t(random.below(6)));
    }
    p->args.bias_ids = list(p->bias_ids);
    p->args.bias_values = list(p->bias_values);
    if (random.chance(0.5)) {
      for (int64_t b = 0; b < lists; ++b) p->num_output.push_back(int32_t(random.below(5)));
      p->args.bias_until = list(p->bias_until);
      p->args.num_output = list(p->num_output);
    }
  }
  if (random.chance(0.6)) {
    p->count_ids = ids(random.pick({1, 5, 40, 1500}));
    for (size_t i = 0; i < p->count_ids.size(); ++i) p->counts.push_back(int32_t(random.below(8)));
    for (int64_t b = 0; b < lists; ++b)
      for (const float x : {random.chance(0.1) ? 0.0f : 1.3f, random.normal(), random.normal()})
        p->penalties.push_back(x);
    p->args.count_ids = list(p->count_ids);
    p->args.counts = list(p->counts);
    p->args.penalties = list(p->penalties);
  }
  return p;
}

// An output of exactly so many elements, none of them written yet.
template <class T>
class Result {
 public:
  explicit Result(int64_t count) : values_(count) {
    if (count > 0) std::memset(values_.data(), 0xFF, values_.size() * sizeof(T));
  }
  T* data() { return values_.data(); }
  const std::vector<T>& values() const { return values_; }
  std::string bytes() const { return {reinterpret_cast<const char*>(values_.data()), values_.size() * sizeof(T)}; }

 private:
  std::vector<T> values_;
};

struct StatsResult {
  Result<float> values;
  Result<int64_t> argmax;
  Result<int32_t> status;
  explicit StatsResult(int64_t rows) : values(rows * kNumValues), argmax(rows), status(rows) {}
  StatsOut out() { return {values.data(), argmax.data(), status.data()}; }
};

inline int32_t make_vocab(Random& random, bool large) {
  if (large) return random.pick({4096, 5001, 9007});
  return random.pick({1, 2, 5, 33, 257, 1000, 1023, 1024, 1025, 2049});
}

inline DType make_dtype(Random& random) { return random.pick({DType::kFloat32, DType::kBFloat16, DType::kFloat16}); }

inline std::string label(const char* op, int64_t batch, int64_t n, int32_t vocab, const std::string& more) {
  return std::string(op) + " batch=" + std::to_string(batch) + " n=" + std::to_string(n) +
         " vocab=" + std::to_string(vocab) + more;
}

inline bool at_border(const UniformBuffer& uniforms) {
  return std::find(uniforms.wide.begin(), uniforms.wide.end(), kLastUniform) != uniforms.wide.end();
}

inline std::vector<int64_t> make_keys(Random& random, int64_t count) {
  std::vector<int64_t> keys(count);
  for (int64_t& key : keys) key = int64_t(random.bits());
  return keys;
}

Case make_case(uint64_t seed, bool large);  // `large`: rows of many tiles

}  // namespace specdec::tests
