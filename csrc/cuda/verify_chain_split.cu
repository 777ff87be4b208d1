// verify_chain with every row split over many blocks, all rows at once, in three launches. The first reads the tiles of
// all rows. The second has one block per position, which finds its laws and the verdict on its draft token. The third
// works on what is left (residual masses, noise); the last block to arrive at a sequence decides it. If a target law
// depends on both rows of a position as a whole, one more launch before the third finds the mixtures. With early exits
// the first two launches go position by position, and once a token is known to be rejected they start on no further row
// of its sequence.
#include "cuda/judge.cuh"
#include "cuda/scratch.h"

namespace specdec::cuda {
namespace {

constexpr int kDecideBlocks = 2;  // of the last kernel per multiprocessor: they leave each thread 128 registers

// Runs of both rows that a warp has in flight: with two, ptxas would exceed that limit on sm_100 and sm_120.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr int kMassStep = 1;
#else
constexpr int kMassStep = 2;
#endif

// The verdict on a position's draft token, and the flags of what was read for it.
struct alignas(16) Judged {
  Step step;        // by the block rule
  Verdict verdict;  // by the token rule
  int32_t status;
};

// What the kernels hand to each other, in device memory. Rows are numbered as in the flat arrays of args.
struct Workspace {
  float *target_tables, *draft_tables;  // [rows, tiles, TileTable::kNumbers]; the draft's only where reads_draft
  RowLaw* target_laws;                  // [target rows] of rules without coins, else null
  Position* positions;               // [target rows] of rules with coins, as after a draft accepted so far, else null,
  Judged* judged;                    // and the verdicts on their draft tokens
  RawRow *target_raws, *draft_raws;  // [rows] of a cascade
  Mixture mixture;                   // every position's, unless finds_mixtures
  float* mass;                       // [target rows, tiles] for mixtures and the block rule, else [batch, tiles]
  Fixed* best;                       // [target rows] noisy keys, match rule
  unsigned* arrived;                 // [batch]
  EarlyExit early;
  unsigned* measured;  // [target rows] blocks that have arrived at a mixture; null: see mixture
  unsigned chunks;     // blocks that share a row
  unsigned groups;     // in the last kernel, of `chunks` blocks each: every groups-th position is a group's
  bool by_runs;        // the last kernel's blocks work by runs: see masses_by_runs
  bool asks_early;     // prefetches all of the draft's rows at the start
};

// Whether the positions' mixtures differ.
SPECDEC_HD bool finds_mixtures(const VerifyChainArgs& args) {
  if (by_match(args)) return false;
  return is_cascade(args.law.kind) || (args.law.kind == LawKind::kLossy && args.law.variant && has_draft(args));
}

// By `workers` threads: each copies every workers-th word.
template <class T>
__device__ __forceinline__ void copy_words(const T& from, T& to, int worker, int workers) {
  static_assert(sizeof(T) % 4 == 0, "words");
  const auto* const source = reinterpret_cast<const unsigned char*>(&from);
  auto* const target = reinterpret_cast<unsigned char*>(&to);
  for (int at = 4 * worker; at < int(sizeof(T)); at += 4 * workers)
    memcpy(__builtin_assume_aligned(target + at, 4), __builtin_assume_aligned(source + at, 4), 4);
}

// Beyond the draft's last token only the row's flags matter.
__device__ __forceinline__ Judged judged_at(const VerifyChainArgs& args, const Span& span, int64_t b, int64_t i,
                                            const Position& position, const DraftToken& token) {
  Judge at(position, token);
  Judged out{{0.0f, 0.0f}, Verdict::kRejected, 0};
  if (i >= span.length) {
    at.read_target(i);
  } else if (by_block(args, b)) {
    at.read_target(i);
    at.read_draft(i);
    out.step = step_at(args.law, at, token.id);
  } else {
    out.verdict = judge_by_token(args, at, i);
  }
  out.status = at.status;
  return out;
}

// What is left at position i if all earlier draft tokens are accepted.
__device__ __forceinline__ Remainder left_at(const VerifyChainArgs& args, const Span& span, int64_t i,
                                             const Mixture& mixture) {
  if (i >= draft_rows(args, span)) return Remainder{};
  return i == span.length ? cascade_of(mixture) : residual_of(args.law, mixture, 1.0f);
}

// One block per position i of sequence b: reads the draft's row, if needed, then the target's. While rows are still
// being read, each of its first warps finds something that depends on no law.
__global__ void __launch_bounds__(kRowThreads, 2)
    verify_laws_kernel(const __grid_constant__ VerifyChainArgs args, const __grid_constant__ Workspace work) {
  SPECDEC_DYNAMIC_SHARED(shared);
  SPECDEC_SHARED(Reading, read, 1);
  SPECDEC_SHARED(Position, now, 1);
  SPECDEC_SHARED(DraftToken, token, 1);
  SPECDEC_SHARED(bool, plain, 1);
  allow_next();
  const int b = int(blockIdx.x % unsigned(args.batch)), i = int(blockIdx.x / unsigned(args.batch));
  const Span span = find_span(args, b);
  const bool wanted = !span.idle && i < target_rows(span), judges = wanted && work.positions && i < span.length;
  const bool drafted = wanted && i < draft_rows(args, span), reads = drafted && reads_draft(args);
  const int64_t index = span.target_index + i, draft_index = span.draft_index + i;
  const auto look_at = [&](bool draft) {
    read[0].row = draft ? draft_row(args, span, i) : target_row(args, span, i);
    read[0].sampling = draft ? draft_sampling(args, b) : target_sampling(args, b);
    read[0].table =
        table_of(draft ? work.draft_tables : work.target_tables, draft ? draft_index : index, read[0].row.tiles());
    read[0].list = reinterpret_cast<float*>(shared);
  };
  if (wanted && lane_id() == 0) {
    if (warp_id() == 0) {
      look_at(reads);
      now[0].row = target_row(args, span, i);
      now[0].cut = cut_of(target_sampling(args, b), args.target.vocab).any;
      now[0].draft_decides = draft_decides(args.law.kind);
      now[0].mixture = work.mixture;
      now[0].left = left_at(args, span, i, work.mixture);
    } else if (warp_id() == 1) {
      if (judges) find_coin(args, span, b, i, token[0]);
    } else if (warp_id() == 2) {
      if (judges && !reads && has_draft(args) && !args.target_to_draft) {  // will be needed once the law is known
        const RowView row = draft_row(args, span, i);
        prefetch(row.data + token_at(args, span, i) * size_of(row.dtype));
      }
      now[0].draft = drafted && !reads ? draft_law(args, span, b, i, RowLaw{}) : DraftLaw{};
      if (judges && !reads) find_q(args, span, i, now[0].draft, token[0]);
    } else if (warp_id() == 3) {
      if (judges) find_logit(args, span, i, token[0]);
    }
  }
  __syncthreads();
  wait_for_previous();
  if (threadIdx.x == 0 && i == 0) work.arrived[b] = 0;
  if (!wanted) return;
  if (work.early.is_beyond(b, i, args.num_draft)) {  // nobody looks at what is written there
    if (threadIdx.x == 0 && work.positions) work.judged[index] = {{}, Verdict::kRejected, 0};
    if (threadIdx.x == 0 && work.target_laws) work.target_laws[index] = {};
    return;
  }

  const bool raw = is_cascade(args.law.kind);
  for (bool draft = reads;; draft = false) {
    if (warp_id() == 0) {
      const bool found = !raw && find_plain_law(read[0]);
      if (lane_id() == 0) plain[0] = found;
    }
    __syncthreads();
    if (!plain[0]) find_law(read[0], raw);
    if (warp_id() == 0) {
      RawRow found{};
      if (raw) found = raw_row(read[0]);
      const bool probs = draft && args.draft_probs.data;
      const float total = probs ? sum_of_tiles(read[0].table.mass, read[0].row.tiles()) : 0.0f;
      if (lane_id() == 0) {
        if (raw) (draft ? work.draft_raws[draft_index] : work.target_raws[index]) = found;
        if (draft) {
          now[0].draft = draft_law(args, span, b, i, probs ? law_of_probs(read[0].law, total) : read[0].law);
          if (judges) find_q(args, span, i, now[0].draft, token[0]);
        } else {
          now[0].law = read[0].law;
        }
      }
    }
    if (!draft) break;
    by_one([&] { look_at(false); });
  }
  __syncthreads();
  if (work.positions && warp_id() == 1) copy_words(now[0], work.positions[index], lane_id(), 32);
  if (threadIdx.x != 0) return;
  if (work.best) work.best[index] = 0;
  if (work.measured) work.measured[index] = 0;
  if (work.target_laws) work.target_laws[index] = now[0].law;
  if (!work.positions || (drafted && work.measured)) return;  // where the mixture is needed first
  const Judged judged = judged_at(args, span, b, i, now[0], token[0]);
  work.judged[index] = judged;
  if (judged.verdict != Verdict::kAccepted) work.early.reject(b, i, args.num_draft);
}

// Copies a position as the laws kernel left it, by one block.
__device__ __forceinline__ void take_position(const Position& from, Position& to) {
  __syncthreads();
  copy_words(from, to, int(threadIdx.x), int(blockDim.x));
  __syncthreads();
}

// Finds the mixture of each position. A measure is summed by all the position's blocks; solving for a scale takes one
// block, as it needs the sum again and again.
__global__ void __launch_bounds__(kRowThreads, 2)
    verify_mixtures_kernel(const __grid_constant__ VerifyChainArgs args, const __grid_constant__ Workspace work) {
  SPECDEC_SHARED(Mixing, mixing, 1);
  SPECDEC_SHARED(Position, at, 1);
  allow_next();
  const unsigned position = blockIdx.x / work.chunks, positions = unsigned(draft_positions(args));
  const int64_t b = position / positions, i = position % positions;
  const int chunk = int(blockIdx.x % work.chunks);
  const Span found = find_span(args, b);
  wait_for_previous();
  if (found.idle || i >= draft_rows(args, found)) return;
  const int64_t index = found.target_index + i;
  take_position(work.positions[index], at[0]);
  by_one([&] {
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
  } else if (!arrives_last(work.measured + index, work.chunks)) {
    return;  // the position is written only when all have read it
  }
  if (threadIdx.x != 0) return;
  at[0].left = left_at(args, found, i, at[0].mixture);
  work.positions[index] = at[0];
  DraftToken token;
  if (i < found.length) {
    find_coin(args, found, b, i, token);
    find_logit(args, found, i, token);
    find_q(args, found, i, at[0].draft, token);
  }
  work.judged[index] = judged_at(args, found, b, i, at[0], token);
}

// One sequence in the last kernel. All threads of a block take the same branches; so do all blocks of the sequence
// until they hand over. Match and greedy have a kernel of their own, with half the code and fewer registers.
template <bool kMatches>
class Chain {
 public:
  // `span` and `now` are in shared memory: all threads use the same ones.
  __device__ Chain(const VerifyChainArgs& args, const Workspace& work, int64_t b, Span& span, Position& now)
      : args_(args), work_(work), b_(b), span_(span), now_(now) {
    const Span found = find_span(args, b);
    by_one([&] { span = found; });
    status_ = span_.status;
    tiles_ = tiles_of(args.target.vocab);
    writes_ = member() == 0;
    if (work.asks_early)
      for (int64_t i = 0; i < draft_rows(args, found); ++i) prefetch_draft(i);
  }

  __device__ void run() {
    Outcome outcome;
    if (!span_.idle) outcome = kMatches ? by_noise() : by_coins(by_block(args_, b_));
    if (writes_) write_outcome(args_, span_, b_, outcome, status_, threadIdx.x, blockDim.x);
  }

  // ---- Answers to common/chain_rules.h, for the block rule and match ----

  __device__ int64_t token(int64_t i) const { return token_at(args_, span_, i); }
  __device__ double coin(int64_t i) { return uniform(i + 1); }
  __device__ void enter(int64_t i, float) {
    at_ = judged(i);
    status_ |= at_.status;
  }
  __device__ float residual(int64_t i) const { return sum_of_tiles(mass_of(i), tiles_); }
  __device__ float next_weight(int64_t, float w) const { return weight_after(at_.step, w); }
  __device__ void remember(int64_t, float w) { remembered_w_ = w; }
  __device__ void end_before(int64_t i) {
    by_one([&] { specdec::end_before(span_, i); });
    status_ |= kBadDraft;
    as_told_ = false;
  }

 private:
  __device__ const RowLaw& target(int64_t i) const { return work_.target_laws[span_.target_index + i]; }
  __device__ TileTable table(int64_t i) const { return table_of(work_.target_tables, span_.target_index + i, tiles_); }
  __device__ float* mass_of(int64_t i) const { return work_.mass + (span_.target_index + i) * tiles_; }
  __device__ const Judged& judged(int64_t i) const { return work_.judged[span_.target_index + i]; }
  // This block's number among the sequence's; its share of a row; whether a position is its own.
  __device__ int members() const { return int(work_.chunks * work_.groups); }
  __device__ int member() const { return int(blockIdx.x % unsigned(members())); }
  __device__ int chunk() const { return int(unsigned(member()) % work_.chunks); }
  __device__ bool has(int64_t i) const { return unsigned(i) % work_.groups == unsigned(member()) / work_.chunks; }
  __device__ double uniform(int64_t i) { return uniform_at(args_, span_, b_, i, &status_); }

  __device__ bool last_to_arrive() { return writes_ = arrives_last(&work_.arrived[b_], members()); }

  // Goes to position i, leaving there w times its law minus Q or, for a bonus, all of P or of a cascade's law.
  __device__ void set_position(int64_t i, float w) {
    take_position(work_.positions[span_.target_index + i], now_);
    if (w == 1.0f && as_told_) return;
    by_one([&] {
      if (i < span_.length)
        now_.left = residual_of(args_.law, now_.mixture, w);
      else if (i < draft_rows(args_, span_))
        now_.left = cascade_of(now_.mixture);
      else
        now_.draft = DraftLaw{}, now_.left = Remainder{};
    });
  }

  // Prefetches this block's share of draft row i, which may still be unread, before its laws are looked up.
  __device__ void prefetch_draft(int64_t i) const {
    if (!has_draft(args_) || args_.target_to_draft || i >= draft_rows(args_, span_)) return;
    const RowView row = draft_row(args_, span_, i);
    for_each_tile(member(), members(), tiles_, [&](int tile) { prefetch_tile(row, tile); });
  }

  // The masses of what is left there, for the tiles of block `rank` of `size`.
  __device__ void find_masses(const TileTable& table, float* mass, int rank, int size) {
    if (!now_.certain()) {
      const bool by_runs = work_.by_runs && !now_.left.mixed && now_.reads_rows();  // else the table tells most
      return by_runs ? masses_by_runs(now_, table, mass, rank, size)
                     : masses_of<false, kMassStep>(now_, table, mass, rank, size);
    }
    if (rank > 0) return;
    for (int tile = int(threadIdx.x); tile < tiles_; tile += int(blockDim.x))
      mass[tile] = tile == 0 ? residual_weight(now_.left.scale, now_.q(now_.law.argmax)) : 0.0f;
  }

  // By the last block: an id from the masses that all blocks have left; from P or a cascade's law if nothing is left.
  __device__ int64_t draw(const TileTable& table, float* mass, double uniform) {
    for (int attempt = 0;; ++attempt) {
      const int32_t id = draw_id(now_, mass, uniform);
      if (id >= 0 || attempt + 1 == kMostRemainders) return max(id, 0);
      by_one([&] { now_.take_all(); });
      if (now_.certain()) return now_.law.argmax;  // of such a row no masses are known
      masses_of<false, kMassStep>(now_, table, mass, 0, 1);
    }
  }

  // What one warp has found out about the draft.
  struct Counted {
    int64_t accepted;
    int32_t status;
    bool impossible;  // the token that comes next
  };

  // The number of tokens before the first that is not accepted. By one warp: the others would only be in its way.
  template <class VerdictAt>
  __device__ int64_t count_accepted(VerdictAt verdict_at) {
    SPECDEC_SHARED(Counted, box, 1);
    if (warp_id() == 0) {
      const Counted counted = counted_by_warp(verdict_at);
      if (lane_id() == 0) box[0] = counted;
    }
    __syncthreads();
    const Counted counted = box[0];
    status_ |= counted.status;
    if (counted.impossible) end_before(counted.accepted);
    return counted.accepted;
  }

  // One position per lane, so that their loads are in flight together.
  template <class VerdictAt>
  __device__ Counted counted_by_warp(VerdictAt verdict_at) const {
    int32_t status = 0;
    for (int64_t begin = 0;; begin += 32) {
      const int64_t i = begin + lane_id();
      int32_t flags = 0;
      const Verdict verdict = i < target_rows(span_) ? verdict_at(i, &flags) : Verdict::kRejected;
      const unsigned stopping = __ballot_sync(kAllLanes, i >= span_.length || verdict != Verdict::kAccepted);
      const unsigned impossible = __ballot_sync(kAllLanes, verdict == Verdict::kImpossible);
      const int first = stopping ? __ffs(int(stopping)) - 1 : 31;
      status |= warp_reduce(lane_id() <= first ? flags : 0, Or{});
      if (stopping) return {begin + first, status, bool(impossible >> first & 1)};
    }
  }

  // The token rule, or the block rule if `weighs`.
  __device__ Outcome by_coins(bool weighs) {
    if (weighs) {
      find_all_masses();
      if (!last_to_arrive()) return {};
    }
    const int64_t i = weighs ? block_rule(*this, span_) : count_accepted([&](int64_t j, int32_t* flags) {
      const Judged found = judged(j);
      *flags = found.status;
      return found.verdict;
    });
    if (next_after(span_, i) == Next::kNothing) return {i, Outcome::kNothing};
    if (!weighs && !work_.asks_early) prefetch_draft(i);
    // Goes to the position of the token after the accepted ones. Flags of what was not read before count now.
    set_position(i, remembered_w_);
    status_ |= now_.law.status;
    if (now_.certain()) return {i, now_.law.argmax};
    status_ |= now_.draft.law.status;
    const double u = uniform(0);
    // If some sequences use the block rule, which needs room at every position, the others must use the same layout.
    float* mass = args_.acceptance == Acceptance::kBlock ? mass_of(i) : work_.mass + b_ * tiles_;
    if (weighs) return {i, draw(table(i), mass, u)};
    if (now_.reads_rows()) {
      find_masses(table(i), mass, member(), members());
      if (!last_to_arrive()) return {};
    } else if (writes_) {
      told_masses(now_, table(i), mass);
    } else {
      return {};
    }
    return {i, draw(table(i), mass, u)};
  }

  // All masses that the block rule could need: what is left at each position given w, which earlier positions decide.
  __device__ void find_all_masses() {
    const auto find = [&](int64_t i, float w) {
      if (!has(i)) return;
      set_position(i, w);
      find_masses(table(i), mass_of(i), chunk(), int(work_.chunks));
    };
    const Walked end = walk_weights(*this, span_, find);
    if (end.w > 0 && !span_.closed) find(span_.length, end.w);
  }

  // Match and greedy.
  __device__ Outcome by_noise() {
    if (work_.best) {
      for (int64_t i = 0; i < target_rows(span_); ++i) {
        const RowLaw law = target(i);
        if (law.one_hot || !has(i)) continue;
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
    const auto wanted = [&](int64_t j, const RowLaw& law) -> int64_t {
      if (!work_.best || law.one_hot) return law.argmax;
      return noisy_id(atomicMax(&work_.best[span_.target_index + j], Fixed(0)));
    };
    const int64_t i = count_accepted([&](int64_t j, int32_t* flags) {
      const RowLaw law = target(j);
      *flags = law.status;
      const bool accepted = j < span_.length && accepts_by_match(*this, j, wanted(j, law));
      return accepted ? Verdict::kAccepted : Verdict::kRejected;
    });
    if (next_after(span_, i) == Next::kNothing) return {i, Outcome::kNothing};
    return {i, wanted(i, target(i))};
  }

  const VerifyChainArgs& args_;
  const Workspace& work_;
  const int64_t b_;
  Span& span_;
  Position& now_;
  Judged at_{};
  float remembered_w_ = 1.0f;
  int32_t status_;
  int tiles_;
  bool writes_;          // this block writes the outputs
  bool as_told_ = true;  // the span is still as it was when the laws were found
};

template <bool kMatches>
__global__ void __launch_bounds__(kRowThreads, kDecideBlocks)
    verify_decide_kernel(const __grid_constant__ VerifyChainArgs args, const __grid_constant__ Workspace work) {
  SPECDEC_SHARED(Span, span, 1);
  SPECDEC_SHARED(Position, now, 1);
  Chain<kMatches> chain(args, work, blockIdx.x / (work.chunks * work.groups), span[0], now[0]);
  wait_for_previous();
  chain.run();
}

// Whether a row alone can show that its draft token is rejected; and whether its table can, without the draft's row.
bool may_exit(const VerifyChainArgs& args) {
  return args.acceptance == Acceptance::kGreedy || (args.acceptance == Acceptance::kToken && !finds_mixtures(args));
}
// If rows are probabilities, one with too little mass has a law that its largest weight does not determine.
bool may_exit_scan(const VerifyChainArgs& args) {
  return may_exit(args) && !reads_draft(args) && args.params.rows == RowKind::kLogits &&
         (args.acceptance == Acceptance::kGreedy || !may_cut(args.params));
}

// The parts of a workspace that the call needs.
void lay_out(const VerifyChainArgs& args, bool early, Arena& arena, Workspace& work) {
  const int64_t target_rows = args.cu ? args.total + args.batch : args.batch * (args.num_draft + 1);
  const int64_t draft_rows = args.law.cascade_bonus ? target_rows : args.total;
  const int64_t tiles = tiles_of(args.target.vocab);
  const bool mixtures = finds_mixtures(args);
  work.target_tables = arena.take<float>(target_rows * tiles * TileTable::kNumbers);
  if (reads_draft(args)) work.draft_tables = arena.take<float>(draft_rows * draft_tiles(args) * TileTable::kNumbers);
  if (by_match(args)) {
    work.target_laws = arena.take<RowLaw>(target_rows);
  } else {
    work.positions = arena.take<Position>(target_rows);
    work.judged = arena.take<Judged>(target_rows);
    const bool everywhere = mixtures || args.acceptance == Acceptance::kBlock;
    work.mass = arena.take<float>(tiles * (everywhere ? target_rows : args.batch));
  }
  if (args.acceptance == Acceptance::kMatch && has_noise(args)) work.best = arena.take<Fixed>(target_rows);
  work.arrived = arena.take<unsigned>(args.batch);
  if (early) {
    work.early.arrived = arena.take<unsigned>(target_rows + args.batch);
    work.early.rejected = work.early.arrived + target_rows;
  }
  if (mixtures) work.measured = arena.take<unsigned>(target_rows);
  if (is_cascade(args.law.kind)) {
    work.target_raws = arena.take<RawRow>(target_rows);
    work.draft_raws = arena.take<RawRow>(draft_rows);
  }
}

// How the last kernel's blocks share a sequence. The block rule and noise look at every position's row, so there is
// work for more blocks than share one row.
void lay_out_last(const VerifyChainArgs& args, Workspace& work) {
  constexpr int kWarps = kRowThreads / 32;
  static_assert(kWarps == kTilesOfBlock * kRuns, "masses_by_runs");
  const int tiles = int(tiles_of(args.target.vocab));
  work.chunks = work.groups = 1;
  if (args.acceptance != Acceptance::kGreedy)
    work.chunks = unsigned(chunks_at_once(tiles, args.batch, kWarps, kDecideBlocks));
  if (args.acceptance == Acceptance::kBlock || work.best)
    work.groups = unsigned(groups_at_once(args.num_draft + 1, args.batch * work.chunks, kDecideBlocks));
  // If there is room for at least twice as many blocks, several warps share a tile's runs.
  const auto most = unsigned(chunks_at_once(tiles, args.batch * work.groups, kTilesOfBlock, kDecideBlocks));
  work.by_runs = !by_match(args) && most >= 2 * work.chunks;
  if (work.by_runs) work.chunks = most;
  // While the laws are found the memory is idle, for about so many bytes.
  constexpr int64_t kIdleBytes = 16 << 20;
  const Rows& draft = rows_of_draft(args);
  work.asks_early = has_draft(args) && !reads_draft(args) && !by_match(args) &&
                    args.total * draft.vocab * size_of(draft.dtype) <= kIdleBytes;
}

}  // namespace

cudaError_t verify_split(const VerifyChainArgs& args, bool early, const Launch& launch) {
  Workspace work{};
  early = early && may_exit(args);
  allocate(launch, [&](Arena& arena) { lay_out(args, early, arena, work); });
  Measure unused;
  work.mixture = work.early.mixture = begin_mixture(args.law, RawRow{}, RawRow{}, 0.0f, &unused);

  const int64_t tiles = tiles_of(args.target.vocab);
  const bool mixtures = finds_mixtures(args);
  cudaError_t error = cudaSuccess;
  if (early) {
    const auto counters = size_t(work.early.rejected + args.batch - work.early.arrived);
    error = cudaMemsetAsync(work.early.arrived, 0, counters * sizeof(unsigned), launch.stream);
  }
  const EarlyExit of_scan = may_exit_scan(args) ? work.early : EarlyExit{};
  if (!error) error = launch_scan(args, work.target_tables, work.draft_tables, of_scan, launch.stream);
  if (error) return error;
  // If no row is cut, one warp finds its law, and four warps are enough for what is looked at beside it.
  const bool cuts = finds_cuts(args);
  Shape shape{dim3(unsigned(args.batch * (args.num_draft + 1))), dim3(cuts ? kRowThreads : 128)};
  shape.shared = cuts ? kMaxListed * sizeof(float) : 0;
  // Without a scan the previous kernel is another's, and may still be writing what this one reads before it waits.
  shape.overlapping = may_overlap() && rows_to_scan(args) > 0;
  error = launch_kernel(verify_laws_kernel, shape, launch.stream, args, work);
  if (error) return error;
  shape.overlapping = may_overlap();
  shape.block = dim3(kRowThreads);
  if (const int64_t positions = args.batch * draft_positions(args); mixtures && positions > 0) {
    work.chunks = is_cascade(args.law.kind) ? chunks_of(int(tiles), positions, kRowThreads / 32) : 1;
    shape.grid = dim3(unsigned(positions * work.chunks));
    shape.shared = 0;
    error = launch_kernel(verify_mixtures_kernel, shape, launch.stream, args, work);
    if (error) return error;
  }
  lay_out_last(args, work);
  shape.grid = dim3(unsigned(args.batch * work.chunks * work.groups));
  shape.shared = 0;
  return by_match(args) ? launch_kernel(verify_decide_kernel<true>, shape, launch.stream, args, work)
                        : launch_kernel(verify_decide_kernel<false>, shape, launch.stream, args, work);
}

}  // namespace specdec::cuda
