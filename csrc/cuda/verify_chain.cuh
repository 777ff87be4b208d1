// What the layouts of verify_chain share (verify_chain.cu chooses among them), and the measurement beside them.
#pragma once
#include "cuda/rows.cuh"
#include "cuda/verify_rows.cuh"

namespace specdec::SPECDEC_CUDA_ROWS {

cudaError_t verify_split(const VerifyChainArgs& args, bool early, const Launch& launch);  // early: see Strategy
cudaError_t verify_walk(const VerifyChainArgs& args, unsigned cluster, const Launch& launch);
// One cluster per position, which keeps its rows in shared memory. resident_cluster gives the blocks of a cluster, or 0
// if the rows do not fit into it or (at_once) not all clusters fit on the device. If no counters are available, nothing
// is launched and *done is false.
unsigned resident_cluster(const VerifyChainArgs& args, bool at_once);
cudaError_t verify_resident(const VerifyChainArgs& args, unsigned cluster, const Launch& launch, bool* done);
int64_t bytes_of_overlap(const VerifyChainArgs& args);
cudaError_t verify_overlap(const VerifyChainArgs& args, void* scratch, const Launch& launch);

// Positions of a sequence that may have a draft law.
SPECDEC_HD int64_t draft_positions(const VerifyChainArgs& args) {
  return args.num_draft + (args.law.cascade_bonus ? 1 : 0);
}

// Rows of a sequence that a split step may read.
SPECDEC_HD int64_t rows_to_scan(const VerifyChainArgs& args) {
  return args.num_draft + bonus_rows(args) + (reads_draft(args) ? draft_positions(args) : 0);
}

// Whether a law that the rules look at needs the list to be found.
inline bool finds_cuts(const VerifyChainArgs& args) {
  return (args.acceptance != Acceptance::kGreedy && may_cut(args.params)) ||
         (reads_draft(args) && may_cut(args.draft_params));
}

// Where blocks tell each other of rejected tokens, after which no row is needed. All 0 at first.
struct EarlyExit {
  unsigned* arrived = nullptr;   // [target rows] blocks that have read their part of a row
  unsigned* rejected = nullptr;  // [batch] num_draft - i, i the first token known to be rejected; null: nobody tells
  Mixture mixture{};             // every position's

  __device__ void reject(int64_t b, int64_t i, int64_t num_draft) const {
    if (rejected) atomicMax(rejected + b, unsigned(num_draft - i));
  }
  // Whether row i is after such a token; the same for all threads of a block.
  __device__ bool is_beyond(int64_t b, int64_t i, int64_t num_draft) const {
    if (!rejected || i == 0) return false;
    // Only one thread asks: another might already read a different value.
    return __syncthreads_or(threadIdx.x == 0 && int64_t(load_now(rejected + b)) > num_draft - i);
  }
};

// Reads all rows that a split step may need, into tables of [rows, tiles, TileTable::kNumbers] in device memory.
cudaError_t launch_scan(const VerifyChainArgs& args, float* target_tables, float* draft_tables, const EarlyExit& early,
                        cudaStream_t stream);

// Block rule: w after a draft token of the position. Out of line to save registers.
inline __device__ __noinline__ float next_weight(const TargetLaw& law, const Position& at, int32_t x, float w) {
  return weight_after(law, at, x, w);
}

// The mass of the remainder at a position, given its tiles' masses; in every lane of a warp.
__device__ __forceinline__ float residual_mass(const Position& at, const float* mass) {
  return at.certain() ? residual_weight(at.left.scale, at.q(at.law.argmax)) : sum_of_tiles(mass, at.row.tiles());
}

}  // namespace specdec::SPECDEC_CUDA_ROWS
