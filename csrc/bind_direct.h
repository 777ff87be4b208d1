// The ops as csrc/direct_ops.h declares them: the same functions that torch's dispatcher calls, given views of tensors.
#pragma once
#include <cstdio>
#include <cstring>
#include <exception>
#include <memory>
#include <stdexcept>
#include <string_view>
#include <utility>

#include "bind_ops.h"
#include "direct_ops.h"

namespace specdec::bind {

// The part of a tensor that the bindings use; `StableTensor` has the same members.
class TensorView {
 public:
  explicit TensorView(const DirectArgument& x) : x_(*static_cast<const DirectTensor*>(x.items)) {}

  int64_t dim() const { return x_.dim; }
  int64_t size(int64_t i) const { return x_.sizes[i]; }
  int64_t stride(int64_t i) const { return x_.strides[i]; }
  int64_t numel() const {
    for (int32_t i = 0; i < x_.dim; ++i)
      if (x_.sizes[i] == 0) return 0;  // the product of the others may overflow
    int64_t count = 1;
    for (int32_t i = 0; i < x_.dim; ++i) count *= x_.sizes[i];
    return count;
  }
  bool is_contiguous() const {
    if (numel() == 0) return true;
    int64_t running = 1;
    for (int32_t i = x_.dim - 1; i >= 0; --i) {
      if (x_.sizes[i] != 1 && x_.strides[i] != running) return false;
      running *= x_.sizes[i];
    }
    return true;
  }
  size_t element_size() const { return size_t(x_.element_size); }
  ScalarType scalar_type() const {
    constexpr ScalarType kTypes[] = {ScalarType::Float, ScalarType::BFloat16, ScalarType::Half,     ScalarType::Long,
                                     ScalarType::Int,   ScalarType::Double,   ScalarType::Undefined};
    return kTypes[x_.dtype];
  }
  void* mutable_data_ptr() const { return x_.data; }
  const void* const_data_ptr() const { return x_.data; }
  bool is_cuda() const { return x_.cuda_device >= 0; }
  int32_t get_device_index() const { return x_.cuda_device; }

 private:
  DirectTensor x_;
};

// A new tensor, as the C calls give one.
class MadeTensor {
 public:
  MadeTensor() = default;
  explicit MadeTensor(AtenTensorHandle handle) : handle_(handle) {}

  void* mutable_data_ptr() const {
    void* data = nullptr;
    SPECDEC_CHECK(aoti_torch_get_data_ptr(handle_.get(), &data) == AOTI_TORCH_SUCCESS,
                  "specdec: a tensor without memory");
    return data;
  }
  AtenTensorHandle release() { return handle_.release(); }

 private:
  struct Delete {
    void operator()(AtenTensorHandle handle) const { aoti_torch_delete_tensor_object(handle); }
  };
  std::unique_ptr<AtenTensorOpaque, Delete> handle_;
};

template <>
struct MadeOf<TensorView> {
  using Type = MadeTensor;
};

inline StableTensor contiguous_copy(const TensorView&) {
  throw std::invalid_argument("copies are made behind the dispatcher");
}

// How a parameter of an op is made from its argument; an argument of another kind has already been refused.
template <class Parameter>
struct Direct;

template <>
struct Direct<TensorView> {
  static constexpr auto kKind = DirectArgument::kTensor;
  static TensorView from(const DirectArgument& x) {
    if (x.kind == DirectArgument::kNone) throw std::invalid_argument("a tensor is missing");
    return TensorView(x);
  }
};

template <>
struct Direct<std::optional<TensorView>> {
  static constexpr auto kKind = DirectArgument::kTensor;
  static std::optional<TensorView> from(const DirectArgument& x) {
    return x.kind == DirectArgument::kNone ? std::nullopt : std::optional(TensorView(x));
  }
};

template <>
struct Direct<int64_t> {
  static constexpr auto kKind = DirectArgument::kInteger;
  static int64_t from(const DirectArgument& x) { return x.number; }
};

template <class Number, DirectArgument::Kind kOfList>
struct DirectNumbers {
  static constexpr auto kKind = kOfList;
  static std::vector<Number> from(const DirectArgument& x) {
    const auto* items = static_cast<const Number*>(x.items);
    return {items, items + x.number};
  }
};
template <>
struct Direct<std::vector<double>> : DirectNumbers<double, DirectArgument::kNumbers> {};
template <>
struct Direct<std::vector<int64_t>> : DirectNumbers<int64_t, DirectArgument::kIntegers> {};

template <class Item>
struct Direct<std::vector<Item>> {
  static constexpr auto kKind = DirectArgument::kTensors;
  static std::vector<Item> from(const DirectArgument& x) {
    const auto* items = static_cast<const DirectArgument*>(x.items);
    std::vector<Item> all;
    all.reserve(size_t(x.number));
    for (int64_t i = 0; i < x.number; ++i) all.push_back(Direct<Item>::from(items[i]));
    return all;
  }
};

template <class Item>
struct Direct<std::optional<std::vector<Item>>> {
  static constexpr auto kKind = DirectArgument::kTensors;
  static std::optional<std::vector<Item>> from(const DirectArgument& x) {
    if (x.kind == DirectArgument::kNone) return std::nullopt;
    return Direct<std::vector<Item>>::from(x);
  }
};

template <auto kFunction>
struct DirectCall;

template <class Result, class... Parameters, Result (*kFunction)(Parameters...)>
struct DirectCall<kFunction> {
  static constexpr DirectArgument::Kind kKinds[] = {Direct<std::remove_cvref_t<Parameters>>::kKind...};

  static DirectEnd run(const DirectArgument* arguments, void** results, DirectWords& words) noexcept {
    kernel_has_begun = false;
    try {
      call(arguments, results, std::index_sequence_for<Parameters...>{});
      return DirectEnd::kDone;
    } catch (const std::exception& error) {
      if (!kernel_has_begun) return DirectEnd::kRefused;
      std::snprintf(words, sizeof words, "%s", error.what());
      return DirectEnd::kFailed;
    }
  }

 private:
  template <size_t... kIndex>
  static void call(const DirectArgument* arguments, void** results, std::index_sequence<kIndex...>) {
    give(kFunction(Direct<std::remove_cvref_t<Parameters>>::from(arguments[kIndex])...), results);
  }
  static void give(MadeTensor made, void** results) { *results = made.release(); }
  template <class... Made>
  static void give(std::tuple<Made...> made, void** results) {
    std::apply([&](auto&... each) { ((*results++ = each.release()), ...); }, made);
  }
};

template <class Result>
constexpr int32_t kNumResults = 1;
template <class... Made>
constexpr int32_t kNumResults<std::tuple<Made...>> = int32_t(sizeof...(Made));

template <class Result, class... Parameters>
constexpr DirectOp direct_op_of(Result (*)(Parameters...), const DirectArgument::Kind* kinds,
                                decltype(DirectOp::run) run) {
  return {int32_t(sizeof...(Parameters)), kNumResults<Result>, kinds, run};
}

template <class Device>
const DirectOp* direct_op(std::string_view name) {
  using Views = Ops<Device, TensorView>;
#define OP(Name, op)                                                                              \
  if (static constexpr DirectOp found =                                                           \
          direct_op_of(&Views::op, DirectCall<&Views::op>::kKinds, &DirectCall<&Views::op>::run); \
      name == #op)                                                                                \
    return &found;
  SPECDEC_OPS(OP)
#undef OP
  return nullptr;
}

}  // namespace specdec::bind
