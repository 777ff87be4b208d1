// verify_chain and verify_packed: which layout takes a call.
#include "cuda/rows.cuh"
#include "cuda/verify_chain.cuh"

namespace specdec::cuda {

cudaError_t verify_chain(const VerifyChainArgs& args, const Launch& launch) {
  if (args.batch == 0) return cudaSuccess;
  const int tiles = tiles_of(args.target.vocab);
  Strategy strategy = forced_strategy();
  if (strategy == Strategy::kAuto)
    strategy = tiles > kRowThreads / 32 ? strategy_for_chains(args.batch) : Strategy::kWalk;
  if (tiles > kMostSharedTiles || draft_tiles(args) > kMostSharedTiles) strategy = Strategy::kSplit;
  const cudaError_t error = strategy == Strategy::kSplit
                                ? verify_split(args, launch)
                                : verify_walk(args, strategy == Strategy::kCluster && hopper_code() ? 2 : 1, launch);
  return error || !args.overlap ? error : verify_overlap(args, launch);
}

}  // namespace specdec::cuda
