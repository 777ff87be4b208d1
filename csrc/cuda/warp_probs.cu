#include "cuda/rows.cuh"

namespace specdec::SPECDEC_CUDA_ROWS {
namespace {

__global__ void __launch_bounds__(kRowThreads, kRowBlocks)
    laws_kernel(const __grid_constant__ RowSet set, RowLaw* laws) {
  SPECDEC_DYNAMIC_SHARED(shared);
  SPECDEC_SHARED(Reading, read, 1);
  allow_next();
  read_row(set, shared, read[0]);
  if (threadIdx.x == 0) laws[blockIdx.x] = read[0].law;
}

__global__ void __launch_bounds__(kRowThreads, kRowBlocks)
    write_probs_kernel(const __grid_constant__ RowSet set, int64_t chunks, const RowLaw* laws, float* out) {
  wait_for_previous();
  const int64_t index = blockIdx.x / chunks;
  set.begin(index);
  const RowView row = set.row(index);
  const RowLaw law = laws[index];
  for (int tile = int(blockIdx.x % chunks) * num_warps() + warp_id(); tile < row.tiles();
       tile += int(chunks) * num_warps()) {
    uint32_t words[kHeld];
    float x[kHeld];
    load_words(row, tile, words);
    unpack<kHeld>(words, row.loaded(), x);
#pragma unroll
    for (int j = 0; j < kRuns; ++j) {
      const int32_t first = held_id(tile, j * kRun);
      float p[kRun];
#pragma unroll
      for (int k = 0; k < kRun; ++k) {
        const float weight = weight_of(x[j * kRun + k], law) * law.inverse_normalizer;
        p[k] = law.one_hot ? float(first + k == law.argmax) : weight;
      }
      float* const to = out + index * row.vocab + first;
      if (row.vocab % 4 == 0 && first + kRun <= row.vocab) {  // then every run begins at a multiple of 16 bytes
        reinterpret_cast<float4*>(to)[0] = make_float4(p[0], p[1], p[2], p[3]);
        reinterpret_cast<float4*>(to)[1] = make_float4(p[4], p[5], p[6], p[7]);
      } else {
#pragma unroll
        for (int k = 0; k < kRun; ++k)
          if (first + k < row.vocab) to[k] = p[k];
      }
    }
  }
}

}  // namespace

cudaError_t find_laws(const RowSet& set, int64_t batch, const Launch& launch, KnownLaws* known) {
  const int64_t count = batch * set.n;
  RowPlan plan;
  RowLaw* laws = nullptr;
  cudaError_t error =
      plan_rows(set, batch, launch, &plan, [&](Arena& arena, bool) { laws = arena.take<RowLaw>(count); });
  if (error) return error;
  error = launch_kernel(laws_kernel, plan.shape, launch.stream, plan.set, laws);
  const int64_t chunks = chunks_of(tiles_of(set.rows.vocab), count, kRowThreads / 32);
  *known = {plan.set, laws, chunks, {dim3(unsigned(count * chunks)), dim3(kRowThreads), 0, 1, may_overlap()}};
  return error;
}

cudaError_t warp_probs(const WarpProbsArgs& args, const Launch& launch) {
  if (args.batch * args.n == 0) return cudaSuccess;
  if (!kProcessed && args.processors.on) return with_processors::warp_probs(args, launch);
  KnownLaws known;
  const cudaError_t error = find_laws(rows_of(args, false, may_cut(args.params)), args.batch, launch, &known);
  return error ? error
               : launch_kernel(write_probs_kernel, known.shape, launch.stream, known.set, known.chunks, known.laws,
                               args.out);
}

}  // namespace specdec::SPECDEC_CUDA_ROWS
