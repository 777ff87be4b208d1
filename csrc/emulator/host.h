// The part of the CUDA runtime that launchers use.
#pragma once
#include <cstddef>
#include <cstring>

#include "emulator/runtime.h"

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidConfiguration = 9 };
using cudaStream_t = struct CUstream_st*;

inline const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaSuccess ? "no error" : "invalid configuration argument";
}
inline cudaError_t cudaGetLastError() { return cudaSuccess; }

inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

inline cudaError_t cudaMemsetAsync(void* address, int byte, size_t bytes, cudaStream_t) {
  specdec::emulator::synchronize();
  std::memset(address, byte, bytes);
  return cudaSuccess;
}
inline cudaError_t cudaStreamSynchronize(cudaStream_t) {
  specdec::emulator::synchronize();
  return cudaSuccess;
}
