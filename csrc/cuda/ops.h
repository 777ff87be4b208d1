// The CUDA kernels: one function per op, each in the file of its name. They enqueue work on the stream and return.
#pragma once
#include <cstdint>
#include <functional>

#include "common/ops.h"
#include "common/params.h"
#include "cuda/portable.h"

namespace specdec::cuda {

struct Launch {
  cudaStream_t stream;
  // Device memory of at least so many bytes, 256-byte aligned, uninitialised, valid until the enqueued work is done.
  std::function<void*(int64_t bytes)> scratch;
};

#define OP(Name, op) cudaError_t op(const Name##Args& args, const Launch& launch);
SPECDEC_OPS(OP)
#undef OP

// The same for csrc/bind_ops.h, which does not know the device.
struct OpKernels {
#define OP(Name, op) static constexpr auto op = cuda::op;
  SPECDEC_OPS(OP)
#undef OP
};

}  // namespace specdec::cuda
