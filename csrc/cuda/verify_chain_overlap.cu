// Sum over ids of min(P, Q) at every position of the spans: a measurement of the draft, with one block per position.
#include "cuda/verify_chain.cuh"
#include "cuda/walk.cuh"

namespace specdec::SPECDEC_CUDA_ROWS {
namespace {

__device__ float overlap_of_tile(const RowView& row, const RowLaw& law, const DraftLaw& draft, int tile) {
  float sum = 0.0f;
#pragma unroll 1
  for (int j = 0; j < kRuns; ++j) {
    const Run x = load_run(row, tile, j), q = draft.of_run(tile, j);
#pragma unroll
    for (int k = 0; k < kRun; ++k) {
      const bool is_argmax = held_id(tile, j * kRun + k) == law.argmax;
      sum += fminf(law.one_hot ? float(is_argmax) : weight_in(x.x[k], law) * law.inverse_normalizer, q.x[k]);
    }
  }
  return warp_reduce(sum, Sum{});
}

// Positions of a sequence that have a block. No segment is longer than all of them together, whatever the bound says;
// what lies behind must be written even if there are no positions.
int64_t width_of(const VerifyChainArgs& args) {
  return args.cu ? std::min(args.num_draft, std::max<int64_t>(args.total, 1)) : args.num_draft;
}

// `tables`: [tiles + draft tiles, TileTable::kNumbers] for each block's position. (Two blocks per multiprocessor would
// leave too few registers for the two ways to read a row.)
__global__ void __launch_bounds__(kRowThreads, 1)
    overlap_kernel(const __grid_constant__ VerifyChainArgs args, float* tables, int64_t width, int tiles,
                   int draft_tiles) {
  SPECDEC_DYNAMIC_SHARED(shared);
  SPECDEC_SHARED(Reading, read, 1);
  SPECDEC_SHARED(DraftLaw, q, 1);
  const int64_t position = blockIdx.x, b = position / width, i = position % width;
  float* const overlap = args.overlap + b * args.num_draft;
  for (int64_t behind = width + i * blockDim.x + threadIdx.x; behind < args.num_draft; behind += width * blockDim.x)
    overlap[behind] = -1.0f;
  const Span span = find_span(args, b);
  if (span.idle || i >= span.length) {
    if (threadIdx.x == 0) overlap[i] = -1.0f;
    return;
  }
  find_overlay(args.processors, b, mask_index(args, span, b), drafted_of(args, span));
  float* base = tables + position * (tiles + draft_tiles) * TileTable::kNumbers;
  const RowView row = target_row(args, span, i);
  const TileTable table(base, tiles);
  // The draft's row first, if it must be read, then the target's, so that the code that reads a row is there once.
  const bool probs = args.draft_probs.data, reads = probs || (args.draft.data && !args.draft_values);
  for (int part = reads ? 0 : 1; part < 2; ++part) {
    by_one([&] {
      if (part == 1) q[0] = draft_law(args, span, b, i, reads ? read[0].law : RowLaw{});
      read[0] = {part ? row : draft_row(args, span, i), part ? target_sampling(args, b) : draft_sampling(args, b),
                 part ? table : TileTable(base + tiles * TileTable::kNumbers, draft_tiles),
                 reinterpret_cast<float*>(shared), RowLaw{}};
    });
    read_row<false>(read[0], nullptr, probs && part == 0);
  }
  const RowLaw& law = read[0].law;
  const DraftLaw& draft = q[0];
  if (draft.kind == DraftLaw::Kind::kPoint) {
    if (threadIdx.x == 0) overlap[i] = prob_at(row, law, draft.token);
    return;
  }
  for (int tile = warp_id(); tile < tiles; tile += num_warps()) {
    const float sum = overlap_of_tile(row, law, draft, tile);
    if (lane_id() == 0) table.mass[tile] = sum;
  }
  __syncthreads();
  if (warp_id() != 0) return;
  const float total = sum_of_tiles(table.mass, tiles);
  if (lane_id() == 0) overlap[i] = total;
}

}  // namespace

// Bytes of scratch memory for verify_overlap.
int64_t bytes_of_overlap(const VerifyChainArgs& args) {
  const int64_t tiles = tiles_of(args.target.vocab) + draft_tiles(args);
  return args.batch * width_of(args) * tiles * int64_t(TileTable::kNumbers * sizeof(float));
}

cudaError_t verify_overlap(const VerifyChainArgs& args, void* scratch, const Launch& launch) {
  const int64_t width = width_of(args), positions = args.batch * width;
  if (positions == 0) return cudaSuccess;
  if (!kProcessed && args.processors.on) return with_processors::verify_overlap(args, scratch, launch);
  const int tiles = tiles_of(args.target.vocab);
  const int of_draft = draft_tiles(args);
  float* const tables = static_cast<float*>(scratch);
  const bool listed = may_cut(args);
  const Shape shape{dim3(unsigned(positions)), dim3(kRowThreads), listed ? kMaxListed * sizeof(float) : 0};
  return launch_kernel(overlap_kernel, shape, launch.stream, args, tables, width, tiles, of_draft);
}

}  // namespace specdec::SPECDEC_CUDA_ROWS
