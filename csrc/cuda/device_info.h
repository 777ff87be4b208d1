#pragma once
// What this library was built for, and whether a device can run it. C symbols, so that Python can read them with ctypes
// before any op exists.

#define SPECDEC_EXPORT extern "C" __attribute__((visibility("default")))

// For example "archs=80;90a;120+PTX runtime=13000". Needs neither a driver nor a device.
SPECDEC_EXPORT const char* specdec_cuda_build_info();

// The architecture of the machine code that `device` would run, for example 90; minus a cudaError_t when it can run none.
SPECDEC_EXPORT int specdec_cuda_binary_version(int device);

namespace specdec::cuda {
// The virtual architecture that the current device's code was compiled for (90 is __CUDA_ARCH__ 900); 0 if there is none.
int virtual_architecture();
}  // namespace specdec::cuda
