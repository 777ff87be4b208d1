#include "cuda/device_info.h"

#include <cuda_runtime_api.h>

#include <thread>

#define SPECDEC_STRING_(x) #x
#define SPECDEC_STRING(x) SPECDEC_STRING_(x)

namespace specdec {
namespace {

// Never launched: it represents all kernels of the library, which are compiled for the same architectures.
__global__ void probe_kernel() {}

}  // namespace
}  // namespace specdec

int specdec::cuda::virtual_architecture() {
  cudaFuncAttributes attributes{};
  return cudaFuncGetAttributes(&attributes, probe_kernel) == cudaSuccess ? attributes.ptxVersion : 0;
}

const char* specdec_cuda_build_info() { return "archs=" SPECDEC_CUDA_ARCHS " runtime=" SPECDEC_STRING(CUDART_VERSION); }

int specdec_cuda_binary_version(int device) {
  // In a thread of its own, whose current device and last error nobody else uses: setting the caller's device back
  // would create a context on it, which takes hundreds of megabytes.
  int answer = 0;
  std::thread([&] {
    cudaFuncAttributes attributes{};
    cudaError_t error = cudaSetDevice(device);
    if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, specdec::probe_kernel);
    answer = error == cudaSuccess ? attributes.binaryVersion : -static_cast<int>(error);
  }).join();
  return answer;
}
