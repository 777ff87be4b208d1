// Registers the CUDA kernels with the schemas that Python defines; see bind_cpu.cpp for the other half.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY_IMPL(specdec, CUDA, m) {
  (void)m;  // the library has no op yet
}
