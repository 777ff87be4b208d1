// The frame of the ops that take rows one by one: one block per row reads it and finds its law; if there are few rows,
// a first kernel spreads the reading over the whole device.
#pragma once
#include <algorithm>

#include "cuda/draw.cuh"
#include "cuda/scratch.h"
#include "cuda/strategy.h"

namespace specdec::SPECDEC_CUDA_ROWS {

constexpr int kRowThreads = 256;
constexpr int kRowBlocks = kProcessed ? 1 : 2;  // per multiprocessor: with processors 128 registers are too few
constexpr int kMostSharedTiles = 512;           // a longer row's table stays in device memory

// Threads of a block that reads whole rows: one warp per tile, at least 4 warps.
inline unsigned threads_for(int tiles, int most) { return 32u * unsigned(std::clamp(tiles, 4, most / 32)); }

// Rows of one op; row `index` is number index % n of the batch that sequence index / n has.
struct RowSet {
  Rows rows;
  int64_t n;
  SamplingArgs params;
  bool raw;     // also the raw moments
  bool listed;  // blocks with a whole row have a list of kMaxListed floats in shared memory, before their table
  float* tables = nullptr;  // [rows, tiles, TileTable::kNumbers] in device memory; null: each block has its own, shared
  BatchIndex row_of{};
  // What a block calls before it looks at a row.
#ifdef SPECDEC_PROCESSED
  ProcessorArgs processors{};
  __device__ void begin(int64_t index) const { find_overlay(processors, index / n, index, Drafted{}); }
#else
  __device__ void begin(int64_t) const {}
#endif
  __device__ bool has(int64_t index) const { return batch_of(row_of, index / n) >= 0; }
  __device__ RowView row(int64_t index) const {
    RowView found = row_view(rows, batch_of(row_of, index / n), index % n);
    found.lay_over(0);
    return found;
  }
  __device__ Sampling sampling(int64_t index) const { return sampling_of(params, index / n); }
  __device__ TileTable table(int64_t index, float* shared) const {
    const int tiles = tiles_of(rows.vocab);
    return TileTable(tables ? tables + index * tiles * TileTable::kNumbers : shared, tiles);
  }
};

// Whether a row may be cut; if so, finding its law needs the list.
inline bool may_cut(const SamplingArgs& p) {
  return p.top_ks || p.top_ps || p.min_ps || p.top_k > 0 || p.top_p < 1 || p.min_p > 0;
}
inline bool may_cut(const VerifyArgs& args) { return may_cut(args.params) || may_cut(args.draft_params); }

// How many blocks share a row's tiles if `rows` rows are read at once: enough to keep the device busy, each with at
// least one tile per warp.
inline int64_t chunks_of(int tiles, int64_t rows, int warps) {
  const int64_t enough = (int64_t(multiprocessors()) * 8 + rows - 1) / rows;
  return std::clamp(enough, int64_t(1), int64_t(tiles + warps - 1) / warps);
}

// The same for blocks that do much before their tiles; `at_once` of them run on a multiprocessor. No more than can run
// at a time.
inline int64_t chunks_at_once(int tiles, int64_t rows, int warps, int at_once) {
  const int64_t room = int64_t(multiprocessors()) * at_once / rows;
  return std::clamp(room, int64_t(1), int64_t(tiles + warps - 1) / warps);
}

// How many groups of such blocks share `rows` rows of every sequence; `blocks` is the number of blocks in all.
inline int64_t groups_at_once(int64_t rows, int64_t blocks, int at_once) {
  return std::clamp(int64_t(multiprocessors()) * at_once / blocks, int64_t(1), rows);
}

// Reads split rows into set.tables. Shared by the ops.
cudaError_t launch_scan(const RowSet& set, int64_t batch, cudaStream_t stream);

struct RowPlan {
  RowSet set;
  Shape shape;  // of a kernel with one block per row
};

// The rows of an op's arguments.
template <class Args>
RowSet rows_of(const Args& args, bool raw, bool listed) {
  RowSet set{args.logits, args.n, args.params, raw, listed};
#ifdef SPECDEC_PROCESSED
  set.processors = args.processors;
#endif
  return set;
}

// Reads the rows if they are to be split; the kernel that follows (of `shape`) calls read_row first. more(arena, split)
// takes what else the op needs from the call's memory. Rows of weights are not split.
template <class More>
cudaError_t plan_rows(const RowSet& set, int64_t batch, const Launch& launch, RowPlan* plan, More more) {
  const int64_t count = batch * set.n;
  const int tiles = tiles_of(set.rows.vocab);
  const Strategy forced = forced_strategy();
  const bool few = tiles > kRowThreads / 32 && count < 4 * multiprocessors();
  const bool weights = set.params.rows != RowKind::kLogits;
  const bool split =
      tiles > kMostSharedTiles || (forced == Strategy::kAuto ? few && !weights : forced == Strategy::kSplit);
  const size_t table = size_t(tiles) * TileTable::kNumbers * sizeof(float);
  plan->set = set;
  plan->shape = {dim3(unsigned(count)), dim3(threads_for(tiles, kRowThreads))};
  plan->shape.shared = (split ? 0 : table) + (set.listed ? kMaxListed * sizeof(float) : 0);
  plan->shape.overlapping = split && !weights && may_overlap();
  allocate(launch, [&](Arena& arena) {
    if (split) plan->set.tables = arena.take<float>(count * tiles * TileTable::kNumbers);
    more(arena, split);
  });
  if (!split || weights) return cudaSuccess;
  return launch_scan(plan->set, batch, launch.stream);
}

// The laws of all rows, for a following kernel of this shape: `chunks` blocks share a row and call wait_for_previous.
struct KnownLaws {
  RowSet set;
  const RowLaw* laws;
  int64_t chunks;
  Shape shape;
};

cudaError_t find_laws(const RowSet& set, int64_t batch, const Launch& launch, KnownLaws* known);  // in warp_probs.cu

// What a block of such a kernel calls first; `shared`: its dynamic shared memory.
template <bool kWeights = false>
__device__ __forceinline__ void read_row(const RowSet& set, unsigned char* shared, Reading& reading) {
  const int64_t index = blockIdx.x;
  set.begin(index);
  by_one([&] {
    reading.row = set.row(index);
    reading.sampling = set.sampling(index);
    reading.list = reinterpret_cast<float*>(shared);
    reading.table = set.table(index, reading.list + (set.listed ? kMaxListed : 0));
  });
  if (set.tables && !kWeights) {
    wait_for_previous();
  } else {
    ScanPlan plan = scan_plan(reading.sampling, reading.row.vocab, set.raw);
    plan.probs = kWeights;  // known at compile time
    scan_row<false>(reading.row, plan, reading.table);
  }
  find_law(reading, true);
}

}  // namespace specdec::SPECDEC_CUDA_ROWS
