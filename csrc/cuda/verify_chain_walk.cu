// verify_chain with a block (or a cluster of them) a sequence: rows are read only as far as the rule gets, and
// both rows of a position once more where a target law needs a measure of them.
#include "cuda/chain_walk.cuh"

namespace specdec::SPECDEC_CUDA_ROWS {
namespace {

// For two blocks a multiprocessor, of 128 registers a thread, it lacks one.
template <bool kClustered>
__global__ void __launch_bounds__(kWalkThreads, 1)
    verify_walk_kernel(const __grid_constant__ VerifyChainArgs args, const __grid_constant__ Place place) {
  SPECDEC_DYNAMIC_SHARED(shared);
  SPECDEC_SHARED(ChainState, state, 1);
  float* const list = reinterpret_cast<float*>(shared);
  const int64_t b = blockIdx.x / Team<kClustered>::size();
  // Other rows than processed ones are read by this layout only where the numbers fit shared memory (`decide` asks).
  float* const numbers = kProcessed ? place.of(b, list) : list + (place.listed ? kMaxListed : 0);
  Chain<kClustered>(args, b, state[0], list, numbers).run();
}

}  // namespace

cudaError_t verify_walk(const VerifyChainArgs& args, unsigned cluster, const Launch& launch) {
  const Place place = place_of(args, launch);
  const Shape shape = walk_shape(args, place, cluster, verify_walk_kernel<true>);
  return launch_kernel(shape.cluster > 1 ? verify_walk_kernel<true> : verify_walk_kernel<false>, shape, launch.stream,
                       args, place);
}

}  // namespace specdec::SPECDEC_CUDA_ROWS
