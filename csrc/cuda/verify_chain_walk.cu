// verify_chain with one block (or one cluster) per sequence: rows are read only as far as the rule gets, and both rows
// of a position once more if a target law needs a measure of them.
#include "cuda/chain_walk.cuh"

namespace specdec::SPECDEC_CUDA_ROWS {
namespace {

// For two blocks per multiprocessor, with 128 registers per thread, it is one register short.
template <bool kClustered>
__global__ void __launch_bounds__(kWalkThreads, 1)
    verify_walk_kernel(const __grid_constant__ VerifyChainArgs args, const __grid_constant__ Place place) {
  SPECDEC_DYNAMIC_SHARED(shared);
  SPECDEC_SHARED(ChainState, state, 1);
  float* const list = reinterpret_cast<float*>(shared);
  const int64_t b = blockIdx.x / Team<kClustered>::size();
  // Unprocessed rows reach this layout only if the numbers fit shared memory (`decide` checks).
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
