#include "common/row_stats.h"
#include "cuda/rows.cuh"

namespace specdec::SPECDEC_CUDA_ROWS {
namespace {

constexpr int kMaxDrawn = kMaxListed / 2;  // noisy keys in the list's place, including ties with the last one drawn

// What the split noise pass gets, one entry per row: see noise_kernel.
struct NoiseState {
  RowLaw* laws;
  Fixed* best;
  unsigned* arrived;
};

__device__ void write_drawn(const SampleArgs& args, const RowView& row, const RowLaw& law, int64_t index, int sample,
                            int32_t id) {
  const int64_t place = index * args.num_samples + sample;
  args.token[place] = id < 0 ? -1 : args.draft_to_target ? args.draft_to_target[id] : id;
  args.log_prob[place] = id < 0 ? -INFINITY : log_prob_of(law, logit_at(row, id));
}

// One id by a uniform; the same in every thread.
__device__ int32_t draw_by_uniform(const Reading& read, double uniform) {
  SPECDEC_SHARED(Position, from, 1);
  by_one([&] { from[0] = {read.row, read.law, cut_of(read.sampling, read.row.vocab).any}; });
  if (from[0].cut) {  // if so, the table has no masses yet
    masses_of(from[0], read.table, read.table.mass, 0, 1);
  }
  return draw_id(from[0], read.table.mass, uniform);
}

// Sorts keys[0 … size), size a power of two, in descending order, by the block.
__device__ void sort_descending(Fixed* keys, int size) {
  for (int span = 2; span <= size; span *= 2)
    for (int step = span / 2; step > 0; step /= 2) {
      __syncthreads();
      for (int i = int(threadIdx.x); i < size; i += int(blockDim.x)) {
        const int other = i ^ step;
        if (other <= i) continue;
        const Fixed a = keys[i], b = keys[other];
        if ((a < b) == ((i & span) == 0)) keys[i] = b, keys[other] = a;
      }
    }
  __syncthreads();
}

// The num_samples best noisy ids, best first, by the block (Gumbel top-k: draws without replacement).
__device__ void draw_many(const SampleArgs& args, const Reading& read, int64_t noise_key, Fixed* keys) {
  SPECDEC_SHARED(int, count, 1);
  const int64_t n = args.num_samples;
  const auto each = [&](float from, auto f) {
    const float limit = limit_of(from);
    for (int tile = warp_id(); tile < read.row.tiles(); tile += num_warps())
      if (read.table.max[tile] >= read.law.cutoff)
        noisy_tile(read.row, read.law, tile, noise_key, args.draft_to_target, limit, f);
  };
  float most = -INFINITY;
  each(-INFINITY, [&](float score, int32_t) { most = fmaxf(most, score); });
  float last = bound_of_nth(most, int(blockDim.x), n);
  for (bool exact = false;; exact = true) {
    __syncthreads();
    if (threadIdx.x == 0) count[0] = 0;
    __syncthreads();
    each(last, [&](float score, int32_t id) {
      if (score < last) return;
      const int place = atomicAdd(count, 1);
      if (place < kMaxDrawn) keys[place] = noisy_key(score, id);
    });
    __syncthreads();
    if (count[0] <= kMaxDrawn || exact) break;
    search().start(range_of(last, block_reduce(most, -INFINITY, Max{}), DType::kFloat32), Fixed(n));
    const auto scores = [&](auto f) { each(last, [&](float score, int32_t) { f(score); }); };
    narrow(scores, [](float) { return Fixed(1); }, [] { return 0; });
    last = search().range.lowest();
  }
  const int drawn = count[0] < kMaxDrawn ? count[0] : kMaxDrawn;
  int size = 2;
  while (size < drawn) size *= 2;
  for (int i = drawn + int(threadIdx.x); i < size; i += int(blockDim.x)) keys[i] = 0;
  sort_descending(keys, size);
  for (int i = int(threadIdx.x); i < args.num_samples; i += int(blockDim.x))
    write_drawn(args, read.row, read.law, int64_t(blockIdx.x), i, i < drawn ? noisy_id(keys[i]) : -1);
}

template <bool kWeights>
__global__ void __launch_bounds__(kRowThreads, kRowBlocks)
    sample_kernel(const __grid_constant__ RowSet set, const __grid_constant__ SampleArgs args,
                  const __grid_constant__ NoiseState noise) {
  SPECDEC_DYNAMIC_SHARED(shared);
  SPECDEC_SHARED(Reading, reading, 1);
  if (noise.laws) allow_next();
  const int64_t index = blockIdx.x;
  const bool there = set.has(index);
  if (there) {
    read_row<kWeights>(set, shared, reading[0]);
  } else {
    wait_for_previous();
    by_one([&] { reading[0].law = law_of_no_row(); });
  }
  const Reading& read = reading[0];
  const bool noisy = args.noise_keys && !read.law.one_hot;
  int32_t id = there ? read.law.argmax : -1;
  if (noisy && args.num_samples > 1) {
    Fixed* keys = reinterpret_cast<Fixed*>(shared);  // find_law is done with the list
    draw_many(args, read, args.noise_keys[index], keys);
  } else if (noisy && !noise.laws) {
    BestNoisy best;
    for (int tile = warp_id(); tile < read.row.tiles(); tile += num_warps())
      if (read.table.max[tile] >= read.law.cutoff)
        best.see(read.row, read.law, tile, args.noise_keys[index], args.draft_to_target);
    id = noisy_id(block_reduce(best.key, Fixed(0), Max{}));
  } else if (!args.noise_keys && args.uniform_samples.data && !read.law.one_hot) {
    int32_t flags = 0;
    const double uniform = uniform_of(args.uniform_samples, index, &flags);
    if (flags) by_one([&] { reading[0].law.status |= flags; });
    id = draw_by_uniform(read, uniform);
  }
  if (noise.laws && threadIdx.x == 0) {
    noise.laws[index] = read.law;
    noise.best[index] = 0;
    noise.arrived[index] = 0;
  }
  if (threadIdx.x == 0) write_stats(read.law, args.out, index, kNotAsked, kNotAsked);
  if (noisy && (args.num_samples > 1 || noise.laws)) return;
  if (warp_id() == 0 && lane_id() == 0) write_drawn(args, read.row, read.law, index, 0, id);
  for (int i = 1 + int(threadIdx.x); i < args.num_samples; i += int(blockDim.x))
    write_drawn(args, read.row, read.law, index, i, -1);
}

// Adds noise to split rows; the last block to arrive at a row writes its draw.
__global__ void __launch_bounds__(kRowThreads, kRowBlocks)
    noise_kernel(const __grid_constant__ RowSet set, const __grid_constant__ SampleArgs args, int64_t chunks,
                 const __grid_constant__ NoiseState noise) {
  wait_for_previous();
  const int64_t index = blockIdx.x / chunks;
  set.begin(index);
  const RowView row = set.row(index);
  const RowLaw law = noise.laws[index];
  if (law.one_hot) return;
  const TileTable table = set.table(index, nullptr);
  BestNoisy best;
  for (int tile = int(blockIdx.x % chunks) * num_warps() + warp_id(); tile < row.tiles();
       tile += int(chunks) * num_warps())
    if (table.max[tile] >= law.cutoff) best.see(row, law, tile, args.noise_keys[index], args.draft_to_target);
  const Fixed key = block_reduce(best.key, Fixed(0), Max{});
  if (threadIdx.x != 0) return;
  atomicMax(&noise.best[index], key);
  __threadfence();
  if (atomicAdd(&noise.arrived[index], 1u) + 1 != unsigned(chunks)) return;
  __threadfence();
  write_drawn(args, row, law, index, 0, noisy_id(atomicMax(&noise.best[index], Fixed(0))));
}

}  // namespace

cudaError_t sample(const SampleArgs& args, const Launch& launch) {
  const int64_t count = args.batch * args.n;
  if (count == 0) return cudaSuccess;
  if (!kProcessed && args.processors.on) return with_processors::sample(args, launch);
  RowSet set = rows_of(args, false, may_cut(args.params) || args.num_samples > 1);
  set.row_of = args.row_of;
  RowPlan plan;
  NoiseState noise{};
  cudaError_t error = plan_rows(set, args.batch, launch, &plan, [&](Arena& arena, bool split) {
    if (!split || !args.noise_keys || args.num_samples > 1) return;
    noise.laws = arena.take<RowLaw>(count);
    noise.best = arena.take<Fixed>(count);
    noise.arrived = arena.take<unsigned>(count);
  });
  if (error) return error;
  const bool weights = args.params.rows != RowKind::kLogits;
  error = launch_kernel(weights ? sample_kernel<true> : sample_kernel<false>, plan.shape, launch.stream, plan.set, args,
                        noise);
  if (error || !noise.laws) return error;
  const int64_t chunks = chunks_of(tiles_of(args.logits.vocab), count, kRowThreads / 32);
  const Shape shape{dim3(unsigned(count * chunks)), dim3(kRowThreads), 0, 1, may_overlap()};
  return launch_kernel(noise_kernel, shape, launch.stream, plan.set, args, chunks, noise);
}

}  // namespace specdec::SPECDEC_CUDA_ROWS
