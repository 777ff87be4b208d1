#include "cuda/device_info.h"

#include <cuda_runtime_api.h>

#define SPECDEC_STRING_(x) #x
#define SPECDEC_STRING(x) SPECDEC_STRING_(x)

namespace specdec {
namespace {

// Never launched: it stands for all kernels of the library, which are compiled for the same architectures.
__global__ void probe_kernel() {}

}  // namespace
}  // namespace specdec

int specdec::cuda::virtual_architecture() {
  cudaFuncAttributes attributes{};
  return cudaFuncGetAttributes(&attributes, probe_kernel) == cudaSuccess ? attributes.ptxVersion : 0;
}

const char* specdec_cuda_build_info() { return "archs=" SPECDEC_CUDA_ARCHS " runtime=" SPECDEC_STRING(CUDART_VERSION); }

int specdec_cuda_binary_version(int device) {
  int previous = 0;
  cudaError_t error = cudaGetDevice(&previous);
  if (error != cudaSuccess) return -static_cast<int>(error);
  error = cudaSetDevice(device);
  cudaFuncAttributes attributes{};
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, specdec::probe_kernel);
  cudaSetDevice(previous);
  cudaGetLastError();  // a failed probe must not surface in the caller's next CUDA call
  return error == cudaSuccess ? attributes.binaryVersion : -static_cast<int>(error);
}
