// Registers the CPU kernels with torch through its stable ABI, and gives them torch's thread pool.
#include <exception>
#include <functional>
#include <mutex>
#include <type_traits>

#include "bind_direct.h"
#include "bind_ops.h"
#include "cpu/ops.h"
#include "cpu/parallel.h"

namespace specdec::cpu {

int num_threads() { return int(torch::stable::get_num_threads()); }

void parallel_for(int64_t n, const std::function<void(int64_t, int64_t)>& f) {
  // An exception that passes through torch's function loses its message.
  std::exception_ptr error;
  std::mutex writes;
  torch::stable::parallel_for(0, n, 1, [&](int64_t begin, int64_t end) {
    try {
      f(begin, end);
    } catch (...) {
      const std::lock_guard lock(writes);
      if (!error) error = std::current_exception();
    }
  });
  if (error) std::rethrow_exception(error);
}

namespace {

struct Device : OpKernels {
  template <class Tensor>
  Device(const char*, const Tensor&) {}
  static int32_t type() { return aoti_torch_device_type_cpu(); }
  static int32_t index() { return 0; }
  // The dispatcher does not look at the tensors in an optional list of optional ones.
  template <class Tensor>
  static void check(const Tensor& x) {
    SPECDEC_CHECK(!x.is_cuda(), "specdec: all tensors must be on the CPU");
  }

  template <class Args>
  static void run(void (*kernel)(const Args&), const std::type_identity_t<Args>& args) {
    bind::kernel_has_begun = true;
    kernel(args);
  }
};

}  // namespace
}  // namespace specdec::cpu

const specdec::DirectOp* specdec_direct_op(const char* name) {
  return specdec::bind::direct_op<specdec::cpu::Device>(name);
}

int64_t specdec_contract() { return SPECDEC_CONTRACT; }
int64_t specdec_direct_layout() { return SPECDEC_DIRECT_LAYOUT; }

STABLE_TORCH_LIBRARY_IMPL(specdec, CPU, m) { specdec::bind::register_ops<specdec::cpu::Device>(m); }
