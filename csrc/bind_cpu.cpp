// Registers the CPU kernels with torch through its stable ABI, and gives them torch's thread pool.
#include <functional>
#include <type_traits>

#include "bind_direct.h"
#include "bind_ops.h"
#include "cpu/ops.h"
#include "cpu/parallel.h"

namespace specdec::cpu {

int num_threads() { return int(torch::stable::get_num_threads()); }

void parallel_for(int64_t n, const std::function<void(int64_t, int64_t)>& f) {
  torch::stable::parallel_for(0, n, 1, [&](int64_t begin, int64_t end) { f(begin, end); });
}

namespace {

struct Device : OpKernels {
  template <class Tensor>
  Device(const char*, const Tensor&) {}
  static int32_t type() { return aoti_torch_device_type_cpu(); }
  static int32_t index() { return 0; }
  // The dispatcher looks at no tensor in an optional list of optional ones.
  template <class Tensor>
  static void check(const Tensor& x) {
    SPECDEC_CHECK(!x.is_cuda(), "specdec: all tensors must be on the CPU");
  }

  template <class Args>
  static void run(void (*kernel)(const Args&), const std::type_identity_t<Args>& args) {
    kernel(args);
  }
};

}  // namespace
}  // namespace specdec::cpu

const specdec::DirectOp* specdec_direct_op(const char* name) {
  return specdec::bind::direct_op<specdec::cpu::Device>(name);
}

STABLE_TORCH_LIBRARY_IMPL(specdec, CPU, m) { specdec::bind::register_ops<specdec::cpu::Device>(m); }
