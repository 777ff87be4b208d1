// verify_chain and verify_packed: which layout handles a call.
#include "cuda/verify_chain.cuh"
#include "cuda/walk.cuh"

namespace specdec::cuda {

namespace {

cudaError_t decide(const VerifyChainArgs& args, const Launch& launch) {
  // Kernels for rows that processors change are compiled for one layout only.
  if (args.processors.on) return with_processors::verify_walk(args, cluster_of(args), launch);
  const int tiles = tiles_of(args.target.vocab);
  const bool chosen = forced_strategy() == Strategy::kAuto;
  Strategy strategy = forced_strategy();
  if (chosen) strategy = tiles > kRowThreads / 32 ? strategy_for_chains(args.batch) : Strategy::kWalk;
  if (tiles > kMostSharedTiles || draft_tiles(args) > kMostSharedTiles)
    strategy = strategy == Strategy::kEarly ? strategy : Strategy::kSplit;
  if (strategy == Strategy::kResident) {
    bool done = false;
    if (const unsigned cluster = resident_cluster(args, chosen); cluster > 0) {
      const cudaError_t error = verify_resident(args, cluster, launch, &done);
      if (done) return error;
    }
    strategy = Strategy::kSplit;
  }
  const bool shared = numbers_of(args) <= kMostSharedNumbers;  // walking kernels look for them only there
  if (strategy == Strategy::kSplit || strategy == Strategy::kEarly || !shared)
    return verify_split(args, strategy == Strategy::kEarly, launch);
  return verify_walk(args, strategy == Strategy::kCluster && hopper_code() ? 2 : 1, launch);
}

}  // namespace

cudaError_t verify_chain(const VerifyChainArgs& args, const Launch& launch) {
  if (args.batch == 0) return cudaSuccess;
  if (!args.overlap) return decide(args, launch);
  // The measurement's memory is allocated together with that of deciding, if that needs any.
  const int64_t measuring = bytes_of_overlap(args);
  void* for_measuring = nullptr;
  const cudaError_t error = decide(args, {launch.stream, [&](int64_t bytes) {
                                            const int64_t first = (bytes + 255) / 256 * 256;
                                            auto* const both =
                                                static_cast<unsigned char*>(launch.scratch(first + measuring));
                                            for_measuring = both + first;
                                            return static_cast<void*>(both);
                                          }});
  if (error || measuring == 0) return error;
  return verify_overlap(args, for_measuring ? for_measuring : launch.scratch(measuring), launch);
}

}  // namespace specdec::cuda
