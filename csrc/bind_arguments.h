// How an op's arguments cross torch's dispatcher, as specdec_kernels/ops/arguments.py defines it: tensors and sizes alone, the
// tensors of sampling parameters in one list, all other numbers in one list of doubles. These structs are that list's order,
// and nothing else is; python_tests/ops/test_arguments.py compares them with the definition.
#pragma once
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "common/params.h"

// Throws what torch raises as a RuntimeError, with a message made of text and numbers. Without a stream: if a process
// has a second C++ library, which some builds of torch bring, putting a number into a stream has been seen to crash.
#define SPECDEC_CHECK(condition, ...)   \
  do {                                  \
    if (!(condition)) [[unlikely]]      \
      specdec::bind::fail(__VA_ARGS__); \
  } while (false)

namespace specdec::bind {

template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::string message;
  const auto add = [&](const auto& part) {
    if constexpr (std::is_integral_v<std::decay_t<decltype(part)>>) {
      message += std::to_string(part);
    } else {
      message += part;
    }
  };
  (add(parts), ...);
  throw std::runtime_error(message);
}

using torch::headeronly::ScalarType;
using Numbers = std::vector<double>;
// If an op is called past the dispatcher, bind_direct.h's TensorView takes the place of these tensors.
using StableTensor = torch::stable::Tensor;
template <class Tensor>
using PerSequenceOf = std::optional<std::vector<std::optional<Tensor>>>;

struct FlatLaw {
  double number, variant, alpha, beta, cascade_bonus;
};

struct FlatParams {
  double temperature, top_k, top_p, min_p, min_p_first;
};

// The tensors of one FlatParams in `per_sequence`, in this order.
enum PerSequenceTensor { kTemperatures, kTopKs, kTopPs, kMinPs, kNumPerSequence };

// The tensors of `processors`, as specdec_kernels/flat.py's FlatProcessors has them.
enum ProcessorTensor {
  kTokenBitmask,
  kAllowed,
  kBiasIds,
  kBiasValues,
  kBiasUntil,
  kPenalties,
  kCountIds,
  kCounts,
  kNumOutput,
  kNumProcessors
};

struct RowStatsSettings {
  FlatParams params;
};

struct WarpProbsSettings {
  FlatParams params;
};

struct MaskLogitsSettings {
  FlatParams params;
};

struct SampleSettings {
  FlatParams params;
  double probs;
};

struct ShardStatsSettings {
  FlatParams params;
  double probs;
};

struct MergeShardsSettings {
  FlatParams params;
  double probs;
};

struct ShardDrawSettings {
  FlatParams params, draft_params;
};

struct TokenLogprobsSettings {
  FlatParams params;
};

struct VerifySettings {
  FlatLaw law;
  FlatParams params, draft_params;
  double target_probs;
};

struct VerifyChainSettings {
  VerifySettings shared;
  double acceptance, return_acceptance;
};

struct VerifyTreeSettings {
  VerifySettings shared;
  double acceptance, epsilon, delta;
};

template <class Settings>
Settings settings_of(const Numbers& given) {
  SPECDEC_CHECK(given.size() * sizeof(double) == sizeof(Settings), "specdec: settings must hold ",
                sizeof(Settings) / sizeof(double), " numbers, got ", given.size());
  Settings settings;
  std::memcpy(&settings, given.data(), sizeof(Settings));
  return settings;
}

inline int64_t integer(double x, double least, double most, const char* what) {
  SPECDEC_CHECK(x >= least && x <= most && x == std::trunc(x), "specdec: ", what, " must be a whole number from ",
                int64_t(least), " to ", int64_t(most));
  return int64_t(x);
}

template <class T>
struct TorchDType;
template <>
struct TorchDType<float> {
  static constexpr ScalarType kType = ScalarType::Float;
  static int32_t code() { return aoti_torch_dtype_float32(); }
};
template <>
struct TorchDType<double> {
  static constexpr ScalarType kType = ScalarType::Double;
  static int32_t code() { return aoti_torch_dtype_float64(); }
};
template <>
struct TorchDType<int32_t> {
  static constexpr ScalarType kType = ScalarType::Int;
  static int32_t code() { return aoti_torch_dtype_int32(); }
};
template <>
struct TorchDType<int64_t> {
  static constexpr ScalarType kType = ScalarType::Long;
  static int32_t code() { return aoti_torch_dtype_int64(); }
};

template <class Tensor>
DType dtype_of(const Tensor& x) {
  switch (x.scalar_type()) {
    case ScalarType::Float:
      return DType::kFloat32;
    case ScalarType::BFloat16:
      return DType::kBFloat16;
    case ScalarType::Half:
      return DType::kFloat16;
    default:
      SPECDEC_CHECK(false, "specdec: logits must be float32, bfloat16 or float16");
      __builtin_unreachable();
  }
}

inline StableTensor contiguous_copy(const StableTensor& x) { return torch::stable::contiguous(x); }

// Where the elements start. Throws if the tensor's memory was given back, or is not aligned to the dtype's elements.
template <class Tensor>
const void* elements_of(const Tensor& x) {
  const void* data = x.const_data_ptr();
  SPECDEC_CHECK(x.numel() == 0 || (data && reinterpret_cast<uintptr_t>(data) % x.element_size() == 0),
                "specdec: a tensor has no memory, or is not aligned to its elements");
  return data;
}

// From an op's tensors to what kernels take, with the checks that memory safety needs: validation, with better
// messages, is in specdec_kernels/ops. Keeps contiguous copies of non-contiguous tensors alive; these are all small.
template <class Device, class Tensor>
class Given {
 public:
  using MaybeTensor = std::optional<Tensor>;
  using PerSequence = PerSequenceOf<Tensor>;

  explicit Given(const Device& device) : device_(device) {}

  // Exactly `count` elements of type T.
  template <class T>
  const T* flat(const Tensor& x, int64_t count, const char* what) {
    SPECDEC_CHECK(x.scalar_type() == TorchDType<T>::kType && x.numel() == count, "specdec: ", what,
                  " has another dtype or shape than it must have");
    return static_cast<const T*>(contiguous(x));
  }
  template <class T>
  const T* flat(const MaybeTensor& x, int64_t count, const char* what) {
    return x ? flat<T>(*x, count, what) : nullptr;
  }

  // The same, to be written to: a copy is refused, as it would receive the result.
  template <class T>
  T* written(const Tensor& x, int64_t count, const char* what) {
    SPECDEC_CHECK(x.is_contiguous(), "specdec: ", what, " must be contiguous");
    flat<T>(x, count, what);
    return static_cast<T*>(x.mutable_data_ptr());
  }

  // Exactly `count` indices of either width.
  Ids ids(const Tensor& x, int64_t count, const char* what) {
    const ScalarType type = x.scalar_type();
    SPECDEC_CHECK((type == ScalarType::Long || type == ScalarType::Int) && x.numel() == count, "specdec: ", what,
                  " has another dtype or shape than it must have");
    return {contiguous(x), type == ScalarType::Long};
  }
  Ids ids(const MaybeTensor& x, int64_t count, const char* what) { return x ? ids(*x, count, what) : Ids{}; }

  // Exactly `count` uniforms of either width.
  Uniforms uniforms(const MaybeTensor& x, int64_t count, const char* what) {
    if (!x) return {};
    const bool is_float64 = x->scalar_type() == ScalarType::Double;
    SPECDEC_CHECK((is_float64 || x->scalar_type() == ScalarType::Float) && x->numel() == count, "specdec: ", what,
                  " has another dtype or shape than it must have");
    return {contiguous(*x), is_float64};
  }

  // [batch, n, vocab]; [n, vocab] as one batch.
  Rows rows(const Tensor& x) const {
    const int64_t dim = x.dim();
    SPECDEC_CHECK((dim == 2 || dim == 3) && (x.stride(dim - 1) == 1 || x.size(dim - 1) == 1 || x.numel() == 0),
                  "specdec: rows must be contiguous in the last dimension");
    device_.check(x);
    const int64_t vocab = x.size(dim - 1);
    SPECDEC_CHECK(1 <= vocab && vocab <= kMostIds, "specdec: a row has 1 to 2**30 elements");
    return {elements_of(x), dtype_of(x), int32_t(vocab), dim == 3 ? x.stride(0) : 0, x.stride(dim - 2)};
  }

  // The same, to be written to: each element must have a place of its own.
  Rows written_rows(const Tensor& x) const {
    x.mutable_data_ptr();  // moves memory that is shared until it is written
    const Rows rows = this->rows(x);
    using Dim = std::pair<int64_t, int64_t>;  // stride and size, of the dimensions around a row
    const int64_t dim = x.dim();
    const Dim inner{x.stride(dim - 2), x.size(dim - 2)}, outer = dim == 3 ? Dim{x.stride(0), x.size(0)} : Dim{0, 1};
    int64_t span = rows.vocab;
    for (const auto& [stride, count] : {std::min(inner, outer), std::max(inner, outer)}) {
      SPECDEC_CHECK(count <= 1 || x.numel() == 0 || stride >= span, "specdec: elements that are written share memory");
      span += stride * (count - 1);
    }
    return rows;
  }

  // One set of sampling parameters; its tensors are those from `first` on.
  SamplingArgs params(const FlatParams& given, const PerSequence& tensors, size_t first, int64_t batch) {
    SamplingArgs args{float(given.temperature),
                      integer(given.top_k, 0, 0x1p31, "top_k"),
                      float(given.top_p),
                      float(given.min_p),
                      given.min_p_first != 0,
                      nullptr,
                      nullptr,
                      nullptr,
                      nullptr};
    if (!tensors) return args;
    const MaybeTensor* const own = tensors->data() + first;
    args.temperatures = flat<float>(own[kTemperatures], batch, "temperature");
    args.top_ks = flat<int64_t>(own[kTopKs], batch, "top_k");
    args.top_ps = flat<float>(own[kTopPs], batch, "top_p");
    args.min_ps = flat<float>(own[kMinPs], batch, "min_p");
    return args;
  }

  // Processors of `batch` sequences with `count` rows of logits.
  ProcessorArgs processors(const PerSequence& tensors, const Rows& rows, int64_t batch, int64_t count) {
    ProcessorArgs args{};
    if (!tensors) return args;
    SPECDEC_CHECK(tensors->size() == kNumProcessors, "specdec: processors must hold ", int(kNumProcessors),
                  " tensors or None");
    const MaybeTensor* const own = tensors->data();
    args.on = true;
    args.words = (rows.vocab + 31) / 32;
    args.bitmask = flat<int32_t>(own[kTokenBitmask], count * args.words, "token_bitmask");
    args.allowed = lists<int32_t>(own[kAllowed], args.words, batch, "allowed");
    const int64_t bias = width_of(own[kBiasIds]), capacity = width_of(own[kCountIds]);
    args.bias_ids = lists<int32_t>(own[kBiasIds], bias, batch, "bias_ids");
    args.bias_values = lists<float>(own[kBiasValues], bias, batch, "bias_values");
    args.bias_until = lists<int32_t>(own[kBiasUntil], bias, batch, "bias_until");
    args.penalties = lists<float>(own[kPenalties], 3, batch, "penalties");
    args.count_ids = lists<int32_t>(own[kCountIds], capacity, batch, "count_ids");
    args.counts = lists<int32_t>(own[kCounts], capacity, batch, "counts");
    args.num_output = lists<int32_t>(own[kNumOutput], 1, batch, "num_output");
    SPECDEC_CHECK(bool(own[kBiasIds]) == bool(own[kBiasValues]) && (!own[kBiasUntil] || own[kBiasIds]) &&
                      (!own[kBiasUntil] || own[kNumOutput]) && bool(own[kPenalties]) == bool(own[kCountIds]) &&
                      bool(own[kPenalties]) == bool(own[kCounts]),
                  "specdec: a tensor of processors is missing beside others");
    return args;
  }

 private:
  static constexpr int64_t kMostIds = int64_t(1) << 30;

  static int64_t width_of(const MaybeTensor& x) {
    if (!x) return 0;
    SPECDEC_CHECK(x->dim() == 2 && x->size(1) <= kMostIds, "specdec: a list of processors has another shape");
    return x->size(1);
  }

  // One list of `width` elements for all sequences, or one for each.
  template <class T>
  Lists<T> lists(const MaybeTensor& x, int64_t width, int64_t batch, const char* what) {
    if (!x) return {};
    const bool one = x->numel() == width;
    return {flat<T>(*x, one ? width : batch * width, what), width, one ? 0 : width};
  }

  const void* contiguous(const Tensor& x) {
    device_.check(x);
    const void* data = elements_of(x);
    if (x.is_contiguous()) return data;
    return copies_.emplace_back(contiguous_copy(x)).const_data_ptr();
  }

  const Device& device_;
  std::vector<StableTensor> copies_;
};

// Checks that this many sets of sampling parameters have their tensors, or that there are none.
template <class PerSequence>
void check_per_sequence(const PerSequence& tensors, size_t sets) {
  SPECDEC_CHECK(!tensors || tensors->size() == sets * kNumPerSequence, "specdec: per_sequence must hold ",
                sets * kNumPerSequence, " tensors or None");
}

}  // namespace specdec::bind
