// verify_chain with every row split over many blocks, all rows at once, in three launches: the tiles of all rows; a block
// a row for its law; then what is left (residual masses, noise), where the last block to arrive at a sequence decides it.
// Where a target law looks at both rows of a position as a whole, one more before the last finds the mixtures.
#include "cuda/rows.cuh"
#include "cuda/scratch.h"
#include "cuda/verify_chain.cuh"

namespace specdec::cuda {
namespace {

// Blocks of the last kernel that a multiprocessor runs, which bound a thread's registers: for sm_120 ptxas does not get by on
// 128. The host counts on two.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
constexpr int kDecideBlocks = 1;
#else
constexpr int kDecideBlocks = 2;
#endif

// What the kernels hand over, in device memory. Rows are numbered as in the flat arrays of args.
struct Workspace {
  float *target_tables, *draft_tables;  // [rows, tiles, TileTable::kNumbers]; the draft's only where reads_draft
  RowLaw *target_laws, *draft_laws;     // [rows]; the draft's only where reads_draft
  RawRow *target_raws, *draft_raws;     // [rows] of a cascade
  Mixture* mixtures;                    // [target rows] where finds_mixtures, else null:
  Mixture mixture;                      // every position's
  float* mass;                          // [target rows, tiles] for mixtures and the block rule, else [batch, tiles]
  Fixed* best;                          // [target rows] noisy keys, match rule
  unsigned* arrived;                    // [batch]
  unsigned* measured;                   // [target rows] blocks that have arrived at a mixture
  int64_t chunks;                       // blocks that share a row
};

// Whether the positions' mixtures differ.
SPECDEC_HD bool finds_mixtures(const VerifyChainArgs& args) {
  return is_cascade(args.law.kind) ||
         (args.law.kind == LawKind::kLossy && args.law.variant && (args.draft.data || args.draft_probs.data));
}

// Rows of a sequence that may be read: its target rows, then its draft rows if those are read.
SPECDEC_HD int64_t tasks_of_sequence(const VerifyChainArgs& args) {
  return args.num_draft + 1 + (reads_draft(args) ? draft_positions(args) : 0);
}

// A row of some sequence, numbered from 0.
struct Task {
  Span span;
  int64_t b, i, index;
  bool is_draft, needed;
  RowView row;
  Sampling sampling;

  __device__ Task(const VerifyChainArgs& args, int64_t task) {
    const int64_t rows = tasks_of_sequence(args);
    b = task / rows;
    i = task % rows;
    is_draft = i > args.num_draft;
    if (is_draft) i -= args.num_draft + 1;
    span = find_span(args, b);
    needed = !span.idle && i < (is_draft ? draft_rows(args, span) : target_rows(span));
    index = (is_draft ? span.draft_index : span.target_index) + i;
    row = is_draft ? draft_row(args, span, i) : target_row(args, span, i);
    sampling = is_draft ? draft_sampling(args, b) : target_sampling(args, b);
  }
};

// True in the one block that arrives last: what the others have written is there to be read.
__device__ __forceinline__ bool arrives_last(unsigned* arrived, int64_t blocks) {
  SPECDEC_SHARED(bool, last, 1);
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last[0] = atomicAdd(arrived, 1u) + 1 == unsigned(blocks);
  __syncthreads();
  __threadfence();
  return last[0];
}

__global__ void __launch_bounds__(kRowThreads, 2)
    verify_laws_kernel(const __grid_constant__ VerifyChainArgs args, const __grid_constant__ Workspace work) {
  SPECDEC_DYNAMIC_SHARED(shared);
  SPECDEC_SHARED(Reading, read, 1);
  allow_next();
  const Task task(args, blockIdx.x);
  wait_for_previous();
  if (threadIdx.x == 0 && task.i == 0 && !task.is_draft) work.arrived[task.b] = 0;
  if (!task.needed) return;
  float* tables = task.is_draft ? work.draft_tables : work.target_tables;
  by_one([&] {
    read[0] = {task.row, task.sampling, table_of(tables, task.index, task.row.tiles()),
               reinterpret_cast<float*>(shared), RowLaw{}};
  });
  const bool raw = is_cascade(args.law.kind);
  find_law(read[0], raw);
  if (warp_id() != 0) return;
  RawRow found{};
  if (raw) found = raw_row(read[0]);
  const bool probs = task.is_draft && args.draft_probs.data;
  const float total = probs ? sum_of_tiles(read[0].table.mass, task.row.tiles()) : 0.0f;
  if (lane_id() != 0) return;
  if (raw) (task.is_draft ? work.draft_raws : work.target_raws)[task.index] = found;
  const RowLaw& law = read[0].law;
  (task.is_draft ? work.draft_laws : work.target_laws)[task.index] = probs ? law_of_probs(law, total) : law;
  if (!task.is_draft && work.best) work.best[task.index] = 0;
  if (!task.is_draft && work.measured) work.measured[task.index] = 0;
}

__device__ __forceinline__ DraftLaw draft_law_at(const VerifyChainArgs& args, const Workspace& work, const Span& span,
                                                 int64_t b, int64_t i) {
  const bool known = reads_draft(args) && !has_stats(args);
  return draft_law(args, span, b, i, known ? work.draft_laws[span.draft_index + i] : RowLaw{});
}

// P of position i, and Q where there is one. By one thread, and out of line for the registers.
__device__ __noinline__ void set_rows(const VerifyChainArgs& args, const Workspace& work, const Span& span, int64_t b,
                                      int64_t i, Position& at) {
  const bool cut = cut_of(target_sampling(args, b), args.target.vocab).any;
  at = {target_row(args, span, i), work.target_laws[span.target_index + i], cut};
  if (i < draft_rows(args, span)) at.draft = draft_law_at(args, work, span, b, i);
}

// Finds the mixture of each position. A measure is summed by all its blocks; solving for a scale takes one block, as the
// sum is wanted again and again.
__global__ void __launch_bounds__(kRowThreads, 2)
    verify_mixtures_kernel(const __grid_constant__ VerifyChainArgs args, const __grid_constant__ Workspace work) {
  SPECDEC_SHARED(Span, span, 1);
  SPECDEC_SHARED(Mixing, mixing, 1);
  SPECDEC_SHARED(Position, at, 1);
  allow_next();
  const int64_t position = blockIdx.x / work.chunks, positions = draft_positions(args);
  const int64_t b = position / positions, i = position % positions;
  const int chunk = int(blockIdx.x % work.chunks);
  const Span found = find_span(args, b);
  wait_for_previous();
  if (found.idle || i >= draft_rows(args, found)) return;
  const int64_t index = found.target_index + i;
  by_one([&] {
    span[0] = found;
    set_rows(args, work, span[0], b, i, at[0]);
    if (work.target_raws) mixing[0] = {work.target_raws[index], work.draft_raws[found.draft_index + i], {}};
    begin(args.law, mixing[0], at[0]);
  });
  const int tiles = at[0].row.tiles();
  float* sums = work.mass + index * tiles;
  if (mixing[0].measure == Measure::kLossyScale) {
    end_mixing<false>(args.law, mixing[0], at[0], sums);
  } else if (mixing[0].measure != Measure::kNothing) {
    measures_of(at[0], mixing[0], sums, chunk, int(work.chunks));
    if (!arrives_last(work.measured + index, work.chunks)) return;
    end(args.law, mixing[0], sum_of_tiles(sums, tiles), at[0]);
  } else if (chunk > 0) {
    return;
  }
  if (threadIdx.x == 0) work.mixtures[index] = at[0].mixture;
}

__device__ __forceinline__ const Mixture& mixture_at(const Workspace& work, int64_t index) {
  return work.mixtures ? work.mixtures[index] : work.mixture;
}

// A position that one lane looks at, for the rules that can look at many at once: what common/chain_rules.h asks of a
// chain.
class Lane {
 public:
  __device__ Lane(const VerifyChainArgs& args, const Workspace& work, const Span& span, int64_t b)
      : args_(args), work_(work), span_(span), b_(b) {}

  int32_t status = 0;

  __device__ int64_t token(int64_t i) const { return token_at(args_, span_, i); }
  __device__ double coin(int64_t i) { return uniform_at(args_, span_, b_, i + 1, &status); }

  __device__ void read_target(int64_t i) {
    i_ = i;
    status |= law().status;
  }
  __device__ void read_draft(int64_t i) {
    draft_ = draft_law_at(args_, work_, span_, b_, i);
    status |= draft_.law.status;
  }

  __device__ bool one_hot() const { return law().one_hot; }
  __device__ int64_t argmax() const { return law().argmax; }
  __device__ float p(int32_t x) const { return prob_at(row(), law(), x); }
  __device__ float q(int32_t x) const { return draft_.prob(x); }
  __device__ bool keeps(int32_t x) const {
    return cuda::keeps(draft_decides(args_.law.kind), mixture(), row(), draft_, x);
  }
  __device__ float accept() const { return mixture().accept; }

  __device__ int64_t wanted(int64_t i) const {
    if (!work_.best || one_hot()) return argmax();
    return noisy_id(atomicMax(&work_.best[span_.target_index + i], Fixed(0)));
  }

 private:
  __device__ const RowLaw& law() const { return work_.target_laws[span_.target_index + i_]; }
  __device__ const Mixture& mixture() const { return mixture_at(work_, span_.target_index + i_); }
  __device__ RowView row() const { return target_row(args_, span_, i_); }

  const VerifyChainArgs& args_;
  const Workspace& work_;
  const Span& span_;
  const int64_t b_;
  int64_t i_ = 0;
  DraftLaw draft_;
};

// One sequence in the last kernel. Every thread of a block goes the same way; so does every block of the sequence until
// they hand over.
class Chain {
 public:
  // `span` and `now` are in shared memory: what all threads know alike.
  __device__ Chain(const VerifyChainArgs& args, const Workspace& work, int64_t b, Span& span, Position& now)
      : args_(args), work_(work), b_(b), span_(span), now_(now) {
    const Span found = find_span(args, b);
    by_one([&] { span = found; });
    status_ = span_.status;
    tiles_ = tiles_of(args.target.vocab);
    writes_ = chunk() == 0;
  }

  __device__ void run() {
    Outcome outcome;
    if (!span_.idle) outcome = by_match(args_) ? by_noise() : by_coins(by_block(args_, b_));
    if (writes_) write_outcome(args_, span_, b_, outcome, status_, threadIdx.x, blockDim.x);
  }

  // ---- What common/chain_rules.h asks of a chain, for the block rule ----

  __device__ int64_t token(int64_t i) const { return token_at(args_, span_, i); }
  __device__ double coin(int64_t i) { return uniform(i + 1); }
  __device__ void enter(int64_t i, float w) {
    set_position(i, w);
    status_ |= now_.law.status | now_.draft.law.status;
  }
  __device__ float residual(int64_t i) const { return residual_mass(now_, mass_of(i)); }
  __device__ float next_weight(int64_t i, float w) const {
    return cuda::next_weight(args_.law, now_, int32_t(token(i)), w);
  }
  __device__ void remember(int64_t, float w) { remembered_w_ = w; }
  __device__ void end_before(int64_t i) {
    by_one([&] { specdec::end_before(span_, i); });
    status_ |= kBadDraft;
  }

 private:
  __device__ const RowLaw& target(int64_t i) const { return work_.target_laws[span_.target_index + i]; }
  __device__ TileTable table(int64_t i) const { return table_of(work_.target_tables, span_.target_index + i, tiles_); }
  __device__ float* mass_of(int64_t i) const { return work_.mass + (span_.target_index + i) * tiles_; }
  __device__ int chunk() const { return int(blockIdx.x % work_.chunks); }
  __device__ double uniform(int64_t i) { return uniform_at(args_, span_, b_, i, &status_); }

  __device__ bool last_to_arrive() { return writes_ = arrives_last(&work_.arrived[b_], work_.chunks); }

  // Goes to position i, where w times its law is left after Q, or of a bonus all of P or of a cascade's law.
  __device__ void set_position(int64_t i, float w) {
    by_one([&] {
      set_rows(args_, work_, span_, b_, i, now_);
      if (i >= draft_rows(args_, span_)) return;
      now_.mixture = mixture_at(work_, span_.target_index + i);
      now_.draft_decides = draft_decides(args_.law.kind);
      now_.left = i == span_.length ? cascade_of(now_.mixture) : residual_of(args_.law, now_.mixture, w);
    });
  }

  // Asks for this block's share of draft row i, which nothing may have read yet, before the laws there are looked up.
  __device__ void prefetch_draft(int64_t i) const {
    if (!has_draft(args_) || args_.target_to_draft || i >= draft_rows(args_, span_)) return;
    const RowView row = draft_row(args_, span_, i);
    for_each_tile(chunk(), int(work_.chunks), tiles_, [&](int tile) { prefetch_tile(row, tile); });
  }

  // The masses of what is left there, this block's share of the tiles.
  __device__ void find_masses(const TileTable& table, float* mass) {
    if (!now_.certain()) masses_of(now_, table, mass, chunk(), int(work_.chunks));
  }

  // By the last block: an id from the masses that all have left; from P or a cascade's law where nothing is left.
  __device__ int64_t draw(const TileTable& table, float* mass, double uniform) {
    for (int attempt = 0;; ++attempt) {
      const int32_t id = draw_id(now_, mass, uniform);
      if (id >= 0 || attempt + 1 == kMostRemainders) return max(id, 0);
      by_one([&] { now_.take_all(); });
      masses_of(now_, table, mass, 0, 1);
    }
  }

  // What one warp found out about the draft.
  struct Counted {
    int64_t accepted;
    int32_t status;
    bool impossible;  // what comes then
  };

  // Those before the first that is not accepted. By one warp: the others would only be in its way.
  template <class Judge>
  __device__ int64_t count_accepted(Judge judge) {
    SPECDEC_SHARED(Counted, box, 1);
    if (warp_id() == 0) {
      const Counted counted = counted_by_warp(judge);
      if (lane_id() == 0) box[0] = counted;
    }
    __syncthreads();
    const Counted counted = box[0];
    status_ |= counted.status;
    if (counted.impossible) end_before(counted.accepted);
    return counted.accepted;
  }

  // A position a lane, so that their loads are in flight together.
  template <class Judge>
  __device__ Counted counted_by_warp(Judge judge) const {
    int32_t status = 0;
    for (int64_t begin = 0;; begin += 32) {
      const int64_t i = begin + lane_id();
      Lane at(args_, work_, span_, b_);
      Verdict verdict = Verdict::kRejected;
      if (i < span_.length)
        verdict = judge(at, i);
      else if (i < target_rows(span_))
        at.read_target(i);
      const unsigned stopping = __ballot_sync(kAllLanes, verdict != Verdict::kAccepted);
      const unsigned impossible = __ballot_sync(kAllLanes, verdict == Verdict::kImpossible);
      const int first = stopping ? __ffs(int(stopping)) - 1 : 31;
      status |= warp_reduce(lane_id() <= first ? at.status : 0, Or{});
      if (stopping) return {begin + first, status, bool(impossible >> first & 1)};
    }
  }

  // The token rule, or the block rule where `weighs`.
  __device__ Outcome by_coins(bool weighs) {
    if (weighs) {
      find_all_masses();
      if (!last_to_arrive()) return {};
    }
    const int64_t i = weighs ? block_rule(*this, span_)
                             : count_accepted([&](Lane& at, int64_t j) { return judge_by_token(args_, at, j); });
    if (next_after(span_, i) == Next::kNothing) return {i, Outcome::kNothing};
    if (!weighs) prefetch_draft(i);
    // Goes to where the token after the accepted ones comes from. What was not read before counts now.
    set_position(i, remembered_w_);
    status_ |= now_.law.status;
    if (now_.certain()) return {i, now_.law.argmax};
    status_ |= now_.draft.law.status;
    const double u = uniform(0);
    // Beside sequences under the block rule, which have room at every position, only the same layout is safe.
    float* mass = args_.acceptance == Acceptance::kBlock ? mass_of(i) : work_.mass + b_ * tiles_;
    if (!weighs) {
      find_masses(table(i), mass);
      if (!last_to_arrive()) return {};
    }
    return {i, draw(table(i), mass, u)};
  }

  // All that the block rule could need: what is left at each position given w, which its own past decides.
  __device__ void find_all_masses() {
    const Walked end = walk_weights(*this, span_, [&](int64_t i, float) { find_masses(table(i), mass_of(i)); });
    if (!(end.w > 0) || span_.closed) return;
    set_position(span_.length, end.w);
    find_masses(table(span_.length), mass_of(span_.length));
  }

  // Match and greedy.
  __device__ Outcome by_noise() {
    if (work_.best) {
      for (int64_t i = 0; i < target_rows(span_); ++i) {
        const RowLaw law = target(i);
        if (law.one_hot) continue;
        const TileTable tiles = table(i);
        const int64_t noise = key_at(args_, span_, b_, i);
        BestNoisy best;
        for_each_tile(chunk(), int(work_.chunks), tiles_, [&](int tile) {
          if (tiles.max[tile] >= law.cutoff) best.see(target_row(args_, span_, i), law, tile, noise, nullptr);
        });
        const Fixed key = warp_reduce(best.key, Max{});
        if (lane_id() == 0 && key) atomicMax(&work_.best[span_.target_index + i], key);
      }
      if (!last_to_arrive()) return {};
    }
    const int64_t i = count_accepted([](Lane& at, int64_t j) {
      at.read_target(j);
      return accepts_by_match(at, j, at.wanted(j)) ? Verdict::kAccepted : Verdict::kRejected;
    });
    if (next_after(span_, i) == Next::kNothing) return {i, Outcome::kNothing};
    Lane last(args_, work_, span_, b_);
    last.read_target(i);
    return {i, last.wanted(i)};
  }

  const VerifyChainArgs& args_;
  const Workspace& work_;
  const int64_t b_;
  Span& span_;
  Position& now_;
  float remembered_w_ = 1.0f;
  int32_t status_;
  int tiles_;
  bool writes_;  // the outputs: this block does
};

__global__ void __launch_bounds__(kRowThreads, kDecideBlocks)
    verify_decide_kernel(const __grid_constant__ VerifyChainArgs args, const __grid_constant__ Workspace work) {
  SPECDEC_SHARED(Span, span, 1);
  SPECDEC_SHARED(Position, now, 1);
  Chain chain(args, work, blockIdx.x / work.chunks, span[0], now[0]);
  wait_for_previous();
  chain.run();
}

// The parts of a workspace that the call needs.
void lay_out(const VerifyChainArgs& args, Arena& arena, Workspace& work) {
  const int64_t target_rows = args.cu ? args.total + args.batch : args.batch * (args.num_draft + 1);
  const int64_t draft_rows = args.law.cascade_bonus ? target_rows : args.total;
  const int64_t tiles = tiles_of(args.target.vocab);
  const bool mixtures = finds_mixtures(args);
  work.target_tables = arena.take<float>(target_rows * tiles * TileTable::kNumbers);
  work.target_laws = arena.take<RowLaw>(target_rows);
  if (reads_draft(args)) {
    work.draft_tables = arena.take<float>(draft_rows * draft_tiles(args) * TileTable::kNumbers);
    work.draft_laws = arena.take<RowLaw>(draft_rows);
  }
  if (!by_match(args))
    work.mass =
        arena.take<float>(tiles * (mixtures || args.acceptance == Acceptance::kBlock ? target_rows : args.batch));
  if (args.acceptance == Acceptance::kMatch && has_noise(args)) work.best = arena.take<Fixed>(target_rows);
  work.arrived = arena.take<unsigned>(args.batch);
  if (mixtures) {
    work.mixtures = arena.take<Mixture>(target_rows);
    work.measured = arena.take<unsigned>(target_rows);
  }
  if (is_cascade(args.law.kind)) {
    work.target_raws = arena.take<RawRow>(target_rows);
    work.draft_raws = arena.take<RawRow>(draft_rows);
  }
}

}  // namespace

cudaError_t verify_split(const VerifyChainArgs& args, const Launch& launch) {
  Workspace work{};
  allocate(launch, [&](Arena& arena) { lay_out(args, arena, work); });
  Measure unused;
  work.mixture = begin_mixture(args.law, RawRow{}, RawRow{}, 0.0f, &unused);

  const int64_t tiles = tiles_of(args.target.vocab);
  const bool mixtures = finds_mixtures(args);
  cudaError_t error = launch_scan(args, work.target_tables, work.draft_tables, launch.stream);
  if (error) return error;
  // Where no row is cut, half the threads are enough for its tiles, and twice the rows are looked at at a time.
  const bool cuts = may_cut(args);
  Shape shape{dim3(unsigned(args.batch * tasks_of_sequence(args))), dim3(cuts ? kRowThreads : kRowThreads / 2)};
  shape.shared = cuts ? kMaxListed * sizeof(float) : 0;
  shape.overlapping = may_overlap();
  error = launch_kernel(verify_laws_kernel, shape, launch.stream, args, work);
  if (error) return error;
  shape.block = dim3(kRowThreads);
  if (const int64_t positions = args.batch * draft_positions(args); mixtures && positions > 0) {
    work.chunks = is_cascade(args.law.kind) ? chunks_of(int(tiles), positions, kRowThreads / 32) : 1;
    shape.grid = dim3(unsigned(positions * work.chunks));
    shape.shared = 0;
    error = launch_kernel(verify_mixtures_kernel, shape, launch.stream, args, work);
    if (error) return error;
  }
  work.chunks = args.acceptance == Acceptance::kGreedy
                    ? 1
                    : chunks_at_once(int(tiles), args.batch, kRowThreads / 32, kDecideBlocks);
  shape.grid = dim3(unsigned(args.batch * work.chunks));
  shape.shared = 0;
  return launch_kernel(verify_decide_kernel, shape, launch.stream, args, work);
}

}  // namespace specdec::cuda
