// The kernels that read rows split over many blocks, one for each dtype and each kind of result. A warp's first tile is
// already being loaded before anything else is looked at.
#include "cuda/judge.cuh"

namespace specdec::cuda {
namespace {

// The most that is wanted of the rows of a launch.
enum class Wanted { kMaxima, kMass, kRaw };

// How rows are to be scanned: all alike, or each sequence's according to its parameters.
struct Plans {
  SamplingArgs params;
  bool greedy, raw, probs, alike;
  ScanPlan plan;  // used if they are alike

  Plans(const SamplingArgs& params, int32_t vocab, bool greedy, bool raw, bool probs = false)
      : params(params),
        greedy(greedy),
        raw(raw),
        probs(probs),
        alike(!params.temperatures && !params.top_ks && !params.top_ps && !params.min_ps) {
    plan = alike ? at(0, vocab) : ScanPlan{true, true, raw, 1.0f};
  }
  __host__ __device__ ScanPlan at(int64_t b, int32_t vocab) const {
    if (probs) return plan_of_probs();
    const Sampling s = sampling_of(params, b);
    return scan_plan(greedy ? made_greedy(s) : s, vocab, raw);
  }
  __device__ ScanPlan of_sequence(int64_t b, int32_t vocab) const { return alike ? plan : at(b, vocab); }
  Wanted wanted() const { return plan.raw ? Wanted::kRaw : plan.mass ? Wanted::kMass : Wanted::kMaxima; }
};

// Where rows are: row (b, i) starts b * stride_batch + i * stride_row bytes from `data`.
struct Place {
  const char* data;
  int64_t stride_batch, stride_row;
  int32_t vocab;
  int whole;  // tiles
  float* tables;
  Plans plans;

  Place(const Rows& rows, float* tables, const Plans& plans)
      : data(static_cast<const char*>(rows.data)),
        stride_batch(rows.stride_batch * size_of(rows.dtype)),
        stride_row(rows.stride_row * size_of(rows.dtype)),
        vocab(rows.vocab),
        whole(rows.vocab / kTile),
        tables(tables),
        plans(plans) {}
  bool aligned() const { return (reinterpret_cast<uintptr_t>(data) | uint64_t(stride_batch | stride_row)) % 16 == 0; }
  __device__ __forceinline__ RowView row(uint32_t b, uint32_t i, DType dtype) const {
    return {(data + b * stride_batch) + i * stride_row, dtype, vocab};
  }
};

// Row i of sequence b, among its target rows or its draft rows.
struct Task {
  uint32_t b, i;
  bool is_draft;
};

// Rows of an op that takes rows one by one.
struct SetScan {
  static constexpr bool kMayBeProbs = false, kExits = false;
  Place places[1];
  int64_t n;
  bool aligned;

  __device__ Task task(uint32_t b, uint32_t i) const { return {b, i, false}; }
  __device__ const Place& place_of(Task) const { return places[0]; }
  __device__ bool find(Task task, DType dtype, RowView* row) const {
    *row = places[0].row(task.b, task.i, dtype);
    return true;
  }
  __device__ bool needs(Task task, int64_t* index) const {
    *index = task.b * n + task.i;
    return true;
  }
};

// The same if an index names each sequence's batch. Separate, as all others would have to wait for a look at the index.
struct IndexedScan : SetScan {
  BatchIndex row_of;

  __device__ bool find(Task task, DType dtype, RowView* row) const {
    const int64_t batch = named_batch(row_of, task.b);
    *row = places[0].row(uint32_t(batch), task.i, dtype);
    return batch >= 0;
  }
};

// Rows of chains: for each sequence its target rows, then its draft rows.
struct ChainScan {
  static constexpr bool kMayBeProbs = true, kExits = false;
  VerifyChainArgs args;
  uint32_t targets;
  bool placed, aligned;  // placed: where rows are depends on the sequence
  Place places[2];       // target, draft

  __device__ Task task(uint32_t b, uint32_t i) const { return {b, i < targets ? i : i - targets, i >= targets}; }
  __device__ const Place& place_of(Task task) const { return task.is_draft ? places[1] : places[0]; }

  // Where a row is; false if there is none: in a packed batch a sequence has as many rows as it has room for.
  __device__ bool find(Task task, DType dtype, RowView* row) const {
    if (!placed) {
      *row = place_of(task).row(task.b, task.i, dtype);
      return true;
    }
    int64_t room;
    const Span span = begin_span(args, task.b, &room);
    if (span.idle || task.i >= room + (task.is_draft ? args.law.cascade_bonus : bonus_rows(args))) return false;
    const int64_t batch = task.is_draft ? span.draft_batch : span.batch;
    *row = place_of(task).row(uint32_t(batch),
                              uint32_t((task.is_draft ? span.first_draft : span.first_target) + task.i), dtype);
    return true;
  }

  // Whether an existing row may be looked at, and its number among the tables.
  __device__ bool needs(Task task, int64_t* index) const {
    const Span span = find_span(args, task.b);
    *index = (task.is_draft ? span.draft_index : span.target_index) + task.i;
    return !span.idle && task.i < (task.is_draft ? draft_rows(args, span) : target_rows(span));
  }
};

// The same with early exits. Separate, as all others would have to wait for a look at what is known to be rejected.
struct EarlyScan : ChainScan {
  static constexpr bool kExits = true;
  EarlyExit early;
};

// After the block has read its part: the last block to have done so for a row looks at its draft token.
inline __device__ __noinline__ void judge_row(const EarlyScan& rows, Task task) {
  SPECDEC_SHARED(Trial, trial, 1);
  const EarlyExit& early = rows.early;
  const Span span = find_span(rows.args, task.b);
  if (task.i >= span.length) return;
  if (threadIdx.x == 0) trial[0].span = span;
  if (!arrives_last(early.arrived + span.target_index + task.i, gridDim.y) || warp_id() > 0) return;
  if (is_rejected(rows.args, early.mixture, task.b, task.i, rows.place_of(task).tables, trial[0]))
    early.reject(task.b, task.i, rows.args.num_draft);
}

constexpr int kWarps = kRowThreads / 32;

// The first tile of a warp: shuffled, so that the compiler sees that it is uniform and no branch on it diverges.
__device__ __forceinline__ int first_tile() { return int(blockIdx.y) * kWarps + __shfl_sync(kAllLanes, warp_id(), 0); }

// What is to be found in a row, and its number among the tables; whether the row is needed at all.
struct Found {
  bool needed;
  ScanPlan plan;
  int64_t index;
};
template <Wanted kWanted, class Rows>
__device__ __forceinline__ Found plan_scan(const Rows& rows, Task task) {
  Found found{};
  found.needed = rows.needs(task, &found.index);
  if (!found.needed) return found;
  const Place& place = rows.place_of(task);
  found.plan = place.plans.of_sequence(task.b, place.vocab);
  found.plan.mass = found.plan.mass && kWanted != Wanted::kMaxima;
  found.plan.raw = found.plan.raw && kWanted == Wanted::kRaw;
  found.plan.probs = found.plan.probs && found.plan.mass && Rows::kMayBeProbs;
  return found;
}

template <Wanted kWanted, class Rows>
__device__ __noinline__ Found plan_apart(const Rows& rows, Task task) {
  return plan_scan<kWanted>(rows, task);
}

template <class Rows>
__device__ __forceinline__ TileScan scan_of(const Rows& rows, Task task, const RowView& row, const Found& found) {
  return {row, found.plan, table_of(rows.place_of(task).tables, found.index, row.tiles())};
}

constexpr auto kStore = [](float* address, float number) { *address = number; };

// The block's row: number first + z of sequence x.
template <class Rows>
__device__ __forceinline__ Task task_of_block(const Rows& rows, uint32_t first) {
  return rows.task(blockIdx.x, first + blockIdx.z);
}

// The last tile of an aligned row if it is not a whole one. A function of its own: the caller has no registers left.
template <DType kType, Wanted kWanted, class Rows>
__device__ __noinline__ void scan_end(const Rows& rows, uint32_t first, int tile) {
  const Task task = task_of_block(rows, first);
  RowView row;
  if (!rows.find(task, kType, &row)) return;
  prefetch_tile(row, tile);
  const Found found = plan_apart<kWanted>(rows, task);
  if (!found.needed) return;
  const TileScan scan = scan_of(rows, task, row, found);
  uint32_t words[kHeld];
  if (kType != DType::kFloat32 && in_whole_runs(row))  // not for float32: it takes more registers
    load_runs<kRuns>(row, row.data, tile, 0, words);
  else
    load_any<false>(row, tile, words);
  scan(words, scan.place(tile), kStore);
}

// Blocks per multiprocessor: 5 leave each thread 48 registers, too few for float32 except on compute capability 9.0.
constexpr int kScanBlocks = 5;
constexpr int blocks_of_scan([[maybe_unused]] DType type, Wanted wanted) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 900
  if (type == DType::kFloat32) return 4;
#endif
  return wanted == Wanted::kRaw ? 4 : kScanBlocks;
}

// A block for chunk y of a row; all rows are aligned. A warp's first tile is already being loaded before anything else
// is looked at.
template <class Rows, DType kType, Wanted kWanted>
__global__ void __launch_bounds__(kRowThreads, blocks_of_scan(kType, kWanted))
    scan_kernel(const __grid_constant__ Rows rows, uint32_t first, int step) {
  allow_next();
  const Task task = task_of_block(rows, first);
  if constexpr (Rows::kExits)
    if (rows.early.is_beyond(task.b, task.i, rows.args.num_draft)) return;
  RowView row;
  if (!rows.find(task, kType, &row)) return;
  const int whole = rows.place_of(task).whole;
  int tile = first_tile();
  constexpr int kEarly = kType == DType::kFloat32 ? kRuns / 2 : kRuns;  // there are too few registers for more
  uint32_t words[kHeld];
  const uint4* pieces = nullptr;
  bool loaded = tile < whole;
  if (loaded) {
    pieces = lane_pieces(row, tile);
    load_whole<kEarly>(pieces, kType, words);
  } else if (kType != DType::kFloat32 && tile * kTile < row.vocab && row.vocab % kRun == 0) {
    // The last tile too, if it is the warp's first: in a call of its own it would take longer than all others.
    load_runs<kEarly>(row, row.data, tile, 0, words);
    loaded = true;
  }
  if (loaded) {
    if (kEarly < kRuns) prefetch_tile(row, tile, kEarly);
    const Found found = plan_scan<kWanted>(rows, task);
    if (!found.needed) return;
    if constexpr (kEarly < kRuns)
      load_whole<kRuns - kEarly>(lane_pieces(row, tile, kEarly), kType, words + kEarly * kRun);
    const TileScan scan = scan_of(rows, task, row, found);
    float* place = scan.place(tile);
#pragma unroll 1
    for (;;) {
      scan(words, place, kStore);
      tile += step;
      if (tile >= whole) break;
      place += step * scan.stride();
      pieces += step * tile_pieces(kType);
      load_whole<kRuns>(pieces, kType, words);
    }
  }
  if (tile < tiles_of(rows.place_of(task_of_block(rows, first)).vocab)) scan_end<kType, kWanted>(rows, first, tile);
  if constexpr (Rows::kExits) judge_row(rows, task_of_block(rows, first));
}

// The same for rows of any alignment, and for whatever is wanted.
template <class Rows, DType kType>
__global__ void __launch_bounds__(kRowThreads, 2)
    scan_shifted_kernel(const __grid_constant__ Rows rows, uint32_t first, int step) {
  allow_next();
  const Task task = task_of_block(rows, first);
  if constexpr (Rows::kExits)
    if (rows.early.is_beyond(task.b, task.i, rows.args.num_draft)) return;
  RowView row;
  if (!rows.find(task, kType, &row)) return;
  int tile = first_tile();
  if (tile < row.tiles()) {
    prefetch_tile(row, tile);
    const Found found = plan_scan<Wanted::kRaw>(rows, task);
    if (!found.needed) return;
    const TileScan scan = scan_of(rows, task, row, found);
#pragma unroll 1
    for (; tile < row.tiles(); tile += step) {
      const TileWords<kType> loaded = load_shifted<kType>(row, tile);
      uint32_t words[kHeld];
#pragma unroll
      for (int w = 0; w < int(sizeof loaded / 4); ++w) words[w] = loaded.words[w];
      scan(words, scan.place(tile), kStore);
    }
  }
  if constexpr (Rows::kExits) judge_row(rows, task);
}

constexpr int64_t kMostDeep = 65535;  // blocks of a grid along z

template <class Rows, DType kType>
auto scan_kernel_for(const Rows& rows, Wanted wanted) {
  if (!rows.aligned) return scan_shifted_kernel<Rows, kType>;
  if constexpr (!Rows::kExits)  // cascades have no early exits
    if (wanted == Wanted::kRaw) return scan_kernel<Rows, kType, Wanted::kRaw>;
  return wanted == Wanted::kMass ? scan_kernel<Rows, kType, Wanted::kMass> : scan_kernel<Rows, kType, Wanted::kMaxima>;
}

// Rows begin … end of each sequence, each by `chunks` blocks.
template <class Rows, DType kType>
cudaError_t launch(const Rows& rows, Wanted wanted, int64_t batch, int64_t begin, int64_t end, int64_t chunks,
                   cudaStream_t stream) {
  cudaError_t error = cudaSuccess;
  for (int64_t first = begin; first < end && !error; first += kMostDeep) {
    Shape shape{dim3(unsigned(batch), unsigned(chunks), unsigned(std::min(end - first, kMostDeep))), dim3(kRowThreads)};
    shape.overlapped = true;
    error = launch_kernel((scan_kernel_for<Rows, kType>(rows, wanted)), shape, stream, rows, uint32_t(first),
                          int(chunks) * kWarps);
  }
  return error;
}

template <class Rows>
cudaError_t launch(DType dtype, const Rows& rows, Wanted wanted, int64_t batch, int64_t begin, int64_t end,
                   int64_t chunks, cudaStream_t stream) {
  return (dtype == DType::kFloat32    ? launch<Rows, DType::kFloat32>
          : dtype == DType::kBFloat16 ? launch<Rows, DType::kBFloat16>
                                      : launch<Rows, DType::kFloat16>)(rows, wanted, batch, begin, end, chunks, stream);
}

}  // namespace

cudaError_t launch_scan(const RowSet& set, int64_t batch, cudaStream_t stream) {
  const int64_t chunks = chunks_of(tiles_of(set.rows.vocab), batch * set.n, kWarps);
  const Place place(set.rows, set.tables, Plans(set.params, set.rows.vocab, false, set.raw));
  const auto run = [&](const auto& rows) {
    return launch(set.rows.dtype, rows, place.plans.wanted(), batch, 0, set.n, chunks, stream);
  };
  const SetScan rows{{place}, set.n, place.aligned()};
  return set.row_of.of.data ? run(IndexedScan{rows, set.row_of}) : run(rows);
}

cudaError_t launch_scan(const VerifyChainArgs& args, float* target_tables, float* draft_tables, const EarlyExit& early,
                        cudaStream_t stream) {
  const bool reads = reads_draft(args), cascade = is_cascade(args.law.kind);
  const Rows& draft = reads ? rows_of_draft(args) : args.target;
  const int64_t targets = args.num_draft + bonus_rows(args), all = rows_to_scan(args);
  if (all == 0) return cudaSuccess;
  const int tiles = tiles_of(args.target.vocab);
  // With early exits, run no more blocks at a time than read one position of each sequence: they come in that order.
  const int64_t chunks = early.rejected ? chunks_at_once(tiles, args.batch, kWarps, kScanBlocks)
                                        : chunks_of(tiles, args.batch * all, kWarps);
  const Place target(args.target, target_tables,
                     Plans(args.params, args.target.vocab, args.acceptance == Acceptance::kGreedy, cascade));
  const Place drafted(draft, draft_tables,
                      Plans(args.draft_params, draft.vocab, reads_greedily(args), cascade, args.draft_probs.data));
  const auto run = [&](DType dtype, Wanted wanted, int64_t begin, int64_t end, bool aligned) {
    const ChainScan rows{args, uint32_t(targets), args.cu || args.draft_of.of.data, aligned, {target, drafted}};
    const auto launched = [&](const auto& all_rows) {
      return launch(dtype, all_rows, wanted, args.batch, begin, end, chunks, stream);
    };
    return early.rejected ? launched(EarlyScan{rows, early}) : launched(rows);
  };
  const Wanted of_target = target.plans.wanted(), of_draft = drafted.plans.wanted();
  if (all > targets && draft.dtype == args.target.dtype)
    return run(draft.dtype, std::max(of_target, of_draft), 0, all, target.aligned() && drafted.aligned());
  const cudaError_t error = run(args.target.dtype, of_target, 0, targets, target.aligned());
  return error ? error : run(draft.dtype, of_draft, targets, all, drafted.aligned());
}

}  // namespace specdec::cuda
