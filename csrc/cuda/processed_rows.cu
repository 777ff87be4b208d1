// Rows that processors change, one by one: row_stats, warp_probs, sample and token_logprobs.
#define SPECDEC_PROCESSED
#include "cuda/row_stats.cu"
#include "cuda/sample.cu"
#include "cuda/token_logprobs.cu"
#include "cuda/warp_probs.cu"

namespace specdec::SPECDEC_CUDA_ROWS {
namespace {

// One block per chunk of a row.
__global__ void __launch_bounds__(kRowThreads, kRowBlocks)
    scan_processed_kernel(const __grid_constant__ RowSet set, int64_t chunks) {
  allow_next();
  const int64_t index = blockIdx.x / chunks;
  if (!set.has(index)) return;
  set.begin(index);
  const RowView row = set.row(index);
  const TileScan scan(row, scan_plan(set.sampling(index), row.vocab, set.raw), set.table(index, nullptr));
  for (int tile = int(blockIdx.x % chunks) * num_warps() + warp_id(); tile < row.tiles();
       tile += int(chunks) * num_warps()) {
    uint32_t words[kHeld];
    load_words(row, tile, words);
    scan(words, scan.place(tile), [](float* address, float number) { *address = number; });
  }
}

}  // namespace

cudaError_t launch_scan(const RowSet& set, int64_t batch, cudaStream_t stream) {
  const int64_t rows = batch * set.n, chunks = chunks_of(tiles_of(set.rows.vocab), rows, kRowThreads / 32);
  Shape shape{dim3(unsigned(rows * chunks)), dim3(kRowThreads)};
  shape.overlapped = true;
  return launch_kernel(scan_processed_kernel, shape, stream, set, chunks);
}

}  // namespace specdec::SPECDEC_CUDA_ROWS
