// Registers the CUDA kernels, compiled for the CPU by csrc/emulator, as the CPU implementation of the ops in a namespace of
// their own. A library for tests: python_tests/emulated.py defines the schemas.
#include <atomic>
#include <cstring>
#include <memory>
#include <new>
#include <type_traits>
#include <vector>

#include "bind_ops.h"
#include "cuda/ops.h"

namespace specdec::cuda {
namespace {

std::atomic<int64_t> allocations{0};  // of scratch memory, by all calls

class Device : public OpKernels {
 public:
  Device(const char* op, const bind::StableTensor&) : op_(op) {}

  static int32_t type() { return aoti_torch_device_type_cpu(); }
  static int32_t index() { return 0; }
  static void check(const bind::StableTensor&) {}

  template <class Args>
  void run(cudaError_t (*kernel)(const Args&, const Launch&), const std::type_identity_t<Args>& args) {
    const cudaError_t error = kernel(args, {nullptr, [this](int64_t bytes) { return scratch(bytes); }});
    SPECDEC_CHECK(error == cudaSuccess, op_, ": ", cudaGetErrorString(error));
  }

 private:
  static constexpr std::align_val_t kAlignment{256};
  struct Delete {
    void operator()(void* data) const { operator delete(data, kAlignment); }
  };

  // Filled with bits that are NaN and, as indices, far out of range, so that no kernel takes it for zeros.
  void* scratch(int64_t bytes) {
    ++allocations;
    void* data = operator new(size_t(bytes), kAlignment);
    scratch_.emplace_back(data);
    return std::memset(data, 0xFF, size_t(bytes));
  }

  const char* op_;
  std::vector<std::unique_ptr<void, Delete>> scratch_;
};

}  // namespace
}  // namespace specdec::cuda

extern "C" __attribute__((visibility("default"))) int64_t specdec_emulated_allocations() {
  return specdec::cuda::allocations;
}

STABLE_TORCH_LIBRARY_IMPL(specdec_emulated, CPU, m) { specdec::bind::register_ops<specdec::cuda::Device>(m); }
