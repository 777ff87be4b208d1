#include "common/philox.h"
#include "cuda/ops.h"

namespace specdec::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) uniform_samples_kernel(UniformSamplesArgs args) {
  const int64_t i = blockIdx.x * int64_t(kThreads) + threadIdx.x;
  if (i >= args.batch * args.num) return;
  const int64_t b = i / args.num;
  const int64_t step = args.steps ? args.steps[b] : args.step;
  args.out[i] = uniform_sample(args.seeds[b], step, args.purpose, uint32_t(i % args.num));
}

}  // namespace

cudaError_t uniform_samples(const UniformSamplesArgs& args, const Launch& launch) {
  const int64_t count = args.batch * args.num;
  if (count == 0) return cudaSuccess;
  const dim3 grid(unsigned((count + kThreads - 1) / kThreads));
  return launch_kernel(uniform_samples_kernel, {grid, dim3(kThreads)}, launch.stream, args);
}

}  // namespace specdec::cuda
