// What an op gives back: new tensors on the call's device, and their leading sizes.
#pragma once
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>

#include "bind_arguments.h"

namespace specdec::bind {

// How an output is returned: through the dispatcher as a tensor, past it (bind_direct.h) as the handle alone.
template <class Tensor>
struct MadeOf {
  using Type = StableTensor;
};

template <class Made>
Made empty(int32_t device_type, int32_t device_index, std::initializer_list<int64_t> sizes, int32_t dtype) {
  // The C call itself: going through the dispatcher as torch::stable::empty does costs twice as much.
  int64_t strides[4] = {}, running = 1;
  const int64_t dim = int64_t(sizes.size());
  for (int64_t d = dim - 1; d >= 0; --d) {
    strides[d] = running;
    SPECDEC_CHECK(!__builtin_mul_overflow(running, std::max<int64_t>(1, sizes.begin()[d]), &running),
                  "specdec: an output would have more elements than there can be");
  }
  AtenTensorHandle handle = nullptr;
  SPECDEC_CHECK(aoti_torch_empty_strided(dim, sizes.begin(), strides, dtype, device_type, device_index, &handle) ==
                    AOTI_TORCH_SUCCESS,
                "specdec: out of memory for an output of ", running, " elements");
  return Made(handle);
}

// Set before a device runs a kernel, which may write to its inputs: whoever sees the call fail must not repeat it.
inline thread_local bool kernel_has_begun = false;

// An output on the call's device, and where its elements start.
template <class Made, class T>
struct Output {
  Made tensor;
  T* data;
  template <class Device>
  Output(const Device& device, std::initializer_list<int64_t> sizes)
      : tensor(empty<Made>(device.type(), device.index(), sizes, TorchDType<T>::code())),
        data(static_cast<T*>(tensor.mutable_data_ptr())) {}
};

// The leading sizes of rows [batch, n, vocab], or [batch, vocab] with one row per sequence; outputs have the same.
struct Leading {
  int64_t batch, n;
  bool flat;

  template <class Tensor>
  Leading(const Tensor& rows, bool may_be_flat) : batch(0), n(1), flat(may_be_flat && rows.dim() == 2) {
    SPECDEC_CHECK(flat || rows.dim() == 3, "specdec: logits must have 3 dimensions");
    batch = rows.size(0);
    if (!flat) n = rows.size(1);
  }
  template <class Out, class Device>
  Out output(const Device& device) const {
    return flat ? Out(device, {batch}) : Out(device, {batch, n});
  }
  template <class Out, class Device>
  Out output(const Device& device, int64_t width) const {
    return flat ? Out(device, {batch, width}) : Out(device, {batch, n, width});
  }
};

}  // namespace specdec::bind
