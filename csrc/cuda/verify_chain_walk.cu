// verify_chain with a block (or a cluster of them) a sequence: rows are read only as far as the rule gets, and
// both rows of a position once more where a target law needs a measure of them.
#include "cuda/chain_walk.cuh"

namespace specdec::cuda {
namespace {

template <bool kClustered>
__global__ void __launch_bounds__(kWalkThreads, kWalkBlocks)
    verify_walk_kernel(const __grid_constant__ VerifyChainArgs args, bool listed) {
  SPECDEC_DYNAMIC_SHARED(shared);
  SPECDEC_SHARED(ChainState, state, 1);
  float* const list = reinterpret_cast<float*>(shared);
  float* const numbers = list + (listed ? kMaxListed : 0);
  Chain<kClustered>(args, blockIdx.x / Team<kClustered>::size(), state[0], list, numbers).run();
}

}  // namespace

cudaError_t verify_walk(const VerifyChainArgs& args, unsigned cluster, const Launch& launch) {
  const bool listed = may_cut(args);
  const unsigned threads = threads_for(tiles_of(args.target.vocab), kWalkThreads);
  const size_t shared = sizeof(float) * size_t((listed ? kMaxListed : 0) + numbers_of(args));
  const Shape shape{dim3(unsigned(args.batch) * cluster), dim3(threads), shared, cluster};
  return launch_kernel(cluster > 1 ? verify_walk_kernel<true> : verify_walk_kernel<false>, shape, launch.stream, args,
                       listed);
}

}  // namespace specdec::cuda
