// Registers the CUDA kernels with torch through its stable ABI: torch's current stream, and scratch from its allocator.
#include <torch/csrc/stable/accelerator.h>

#include <type_traits>
#include <vector>

#include "bind_direct.h"
#include "bind_ops.h"
#include "cuda/ops.h"

// Weak, so that the same library also loads, without ever calling it, where torch was built without CUDA.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream);

namespace specdec::cuda {
namespace {

class Device : public OpKernels {
 public:
  template <class Tensor>
  Device(const char* op, const Tensor& like) : op_(op), index_(like.get_device_index()) {
    SPECDEC_CHECK(like.is_cuda(), op_, ": the tensors must be on a CUDA device");
    // A guard costs an allocation, so only if the tensors are not on the current device.
    if (torch::stable::accelerator::getCurrentDeviceIndex() != index_) guard_.emplace(index_);
  }

  static int32_t type() { return aoti_torch_device_type_cuda(); }
  int32_t index() const { return index_; }
  template <class Tensor>
  void check(const Tensor& x) const {
    SPECDEC_CHECK(x.is_cuda() && x.get_device_index() == index_, op_, ": all tensors must be on cuda:", index_);
  }

  template <class Args>
  void run(cudaError_t (*kernel)(const Args&, const Launch&), const std::type_identity_t<Args>& args) {
    void* stream = nullptr;
    SPECDEC_CHECK(aoti_torch_get_current_cuda_stream(index_, &stream) == AOTI_TORCH_SUCCESS, op_,
                  ": torch names no current stream");
    bind::kernel_has_begun = true;
    const cudaError_t error =
        kernel(args, {static_cast<cudaStream_t>(stream), [this](int64_t bytes) { return scratch(bytes); }});
    if (error == cudaSuccess) return;
    cudaGetLastError();  // else it would surface in our next launch
    SPECDEC_CHECK(false, op_, ": ", cudaGetErrorString(error));
  }

 private:
  // Freed when the call returns, although the kernels may not even have begun: the allocator hands memory on in stream
  // order.
  void* scratch(int64_t bytes) {
    const int64_t size = bytes, stride = 1;
    AtenTensorHandle handle = nullptr;
    SPECDEC_CHECK(aoti_torch_empty_strided(1, &size, &stride, aoti_torch_dtype_uint8(), type(), index_, &handle) ==
                      AOTI_TORCH_SUCCESS,
                  op_, ": out of memory for ", bytes, " bytes of scratch memory");
    return scratch_.emplace_back(handle).mutable_data_ptr();
  }

  const char* op_;
  int32_t index_;
  std::optional<torch::stable::accelerator::DeviceGuard> guard_;
  std::vector<bind::StableTensor> scratch_;
};

}  // namespace
}  // namespace specdec::cuda

const specdec::DirectOp* specdec_direct_op(const char* name) {
  return specdec::bind::direct_op<specdec::cuda::Device>(name);
}

int64_t specdec_contract() { return SPECDEC_CONTRACT; }
int64_t specdec_direct_layout() { return SPECDEC_DIRECT_LAYOUT; }

STABLE_TORCH_LIBRARY_IMPL(specdec, CUDA, m) { specdec::bind::register_ops<specdec::cuda::Device>(m); }
