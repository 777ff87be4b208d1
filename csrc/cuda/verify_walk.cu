// verify with a block (or a cluster of them) a sequence: rows are read only as far as the rule gets, and
// both rows of a position once more where a target law needs a measure of them.
#include "cuda/walk.cuh"

namespace specdec::cuda {
namespace {

// Bytes of a block's shared memory: the list, two tables, two rows of masses.
size_t shared_bytes(const VerifyChainArgs& args, bool listed) {
  const size_t tiles = (args.target.vocab + kTile - 1) / kTile;
  const int32_t draft_vocab = args.draft.data ? args.draft.vocab : args.draft_probs.data ? args.draft_probs.vocab : 0;
  const size_t draft_tiles = (draft_vocab + kTile - 1) / kTile;
  return sizeof(float) * ((listed ? kMaxListed : 0) + (tiles + draft_tiles) * TileTable::kNumbers + 2 * tiles);
}

// What all threads of a block know alike is kept in shared memory, not in everybody's registers.
struct State {
  Span span;
  Reading target, draft;
  Mixing mixing;            // of the present position
  Remainder now, best;      // at the present position, and (block rule) at the last one that was a success
  float *mass, *best_mass;  // of their tiles
};

// One sequence. Every thread of every block of the team goes the same way, with the same numbers.
template <bool kClustered>
class Walk {
 public:
  using Group = Team<kClustered>;

  __device__ Walk(const VerifyChainArgs& args, int64_t b, State& state, bool listed, float* shared)
      : args_(args), state_(state), b_(b) {
    const Span span = find_span(args, b);
    float* after_list = shared + (listed ? kMaxListed : 0);
    by_one([&] {
      state.span = span;
      state.mass = after_list + tiles() * TileTable::kNumbers;
      state.best_mass = state.mass + tiles();
      state.target.list = state.draft.list = shared;
      state.target.sampling = target_sampling(args, b);
      state.target.table = TileTable(after_list, tiles());
      state.draft.sampling = draft_sampling(args, b);
      if (reads_draft(args)) state.draft.table = TileTable(state.best_mass + tiles(), draft_row(args, span, 0).tiles());
      state.now.cut = state.best.cut = cut_of(state.target.sampling, args.target.vocab).any;
    });
    out_.status = span.status;
  }

  __device__ void run() {
    if (!state_.span.idle) {
      if (args_.acceptance == Acceptance::kMatch || args_.acceptance == Acceptance::kGreedy)
        out_.final = match_rule();
      else
        out_.final = final_token(by_block(args_, b_) ? block_rule() : token_rule());
    }
    if (Group::rank() == 0) write_outcome(args_, state_.span, b_, out_);
    Group::sync();  // no block may end while another could still write into its shared memory
  }

 private:
  // What a rule leaves the last token to be drawn from: a bonus' row that has been read, or a remainder.
  enum class Left { kNothing, kBonus, kNow, kBest };

  __device__ int tiles() const { return (args_.target.vocab + kTile - 1) / kTile; }
  __device__ int64_t token(int64_t i) const { return token_at(args_, state_.span, i); }
  __device__ bool cascade() const { return is_cascade(args_.law.kind); }
  __device__ float uniform(int64_t i) { return uniform_at(args_, state_.span, i, &out_.status); }

  // Reads target row i, without a draft; its flags count from here on.
  __device__ void read_target(int64_t i) {
    by_one([&] { state_.target.row = target_row(args_, state_.span, i); });
    read_row<kClustered>(state_.target, cascade() ? &state_.mixing.target : nullptr);
    by_one([&] {
      state_.mixing.measure = Measure::kNothing;
      state_.now = {state_.target.row, state_.target.law, state_.now.cut, 1.0f, DraftLaw{}};
    });
    out_.status |= state_.now.law.status;
  }

  // And the draft's row i, whose flags count too; begins the position's mixture.
  __device__ void read_draft(int64_t i) {
    if (reads_draft(args_)) {
      by_one([&] { state_.draft.row = draft_row(args_, state_.span, i); });
      read_row<kClustered>(state_.draft, cascade() ? &state_.mixing.draft : nullptr);
    }
    by_one([&] {
      if (args_.draft_probs.data) state_.draft.law = flags_alone(state_.draft.law);
      state_.now.draft = draft_law(args_, state_.span, b_, i, state_.draft.law);
      if (args_.law.kind != LawKind::kLossless) begin(args_.law, state_.mixing, state_.now);
    });
    out_.status |= state_.now.draft.law.status;
  }

  __device__ void end_mixture() {
    if (state_.mixing.measure != Measure::kNothing)
      end_mixing<kClustered>(args_.law, state_.mixing, state_.now, state_.mass);
  }

  // Leaves at the present position what w times its law has and the draft has not.
  __device__ void set_residual(float w) {
    end_mixture();
    by_one([&] { state_.now.set_residual(args_.law, w); });
  }

  __device__ void find_masses(const Remainder& from) {
    Group::sync();  // the masses may still be in use
    masses_of<kClustered>(from, state_.target.table, state_.mass, int(Group::rank()), int(Group::size()));
    Group::sync();
  }

  // The token after the accepted ones. Where nothing is left of a remainder, from P, or from a cascade's law.
  __device__ int64_t final_token(Left left) {
    if (left == Left::kNothing) return Outcome::kNothing;
    if (left == Left::kBonus && args_.law.cascade_bonus) {
      read_draft(out_.accepted);
      end_mixture();
      by_one([&] { state_.now.set_cascade(); });
    }
    const bool found = left == Left::kBest;  // its masses, too
    Remainder& from = found ? state_.best : state_.now;
    if (from.certain()) return from.law.argmax;
    const float u = uniform(0);
    if (!found) find_masses(from);
    int32_t id = draw(from, found ? state_.best_mass : state_.mass, u);
    if (id >= 0) return id;
    if (found && !from.mixed) read_target(out_.accepted);  // the table is another row's by now
    by_one([&] { from.take_all(); });
    find_masses(from);
    return max(draw(from, state_.mass, u), 0);
  }

  __device__ Left token_rule() {
    const Remainder& now = state_.now;
    for (;; ++out_.accepted) {
      const int64_t i = out_.accepted;
      if (state_.span.ends_in_eos && i == state_.span.length) return Left::kNothing;
      read_target(i);
      if (i == state_.span.length) return Left::kBonus;
      const int32_t x = int32_t(token(i));
      if (now.law.one_hot && !cascade()) {
        if (x != now.law.argmax) break;
        continue;
      }
      read_draft(i);
      const Measure measure = state_.mixing.measure;
      // Whether x is kept does not depend on the mass deferred, nor on a lossy law's scale whether it is accepted.
      if (measure == Measure::kTotalVariation || measure == Measure::kCrossEntropy) end_mixture();
      if (needs_no_coin(args_.law, now.mixture, now.row, now.draft, x)) continue;
      if (measure == Measure::kDeferredMass) end_mixture();
      const float p = now.mixture.accept * prob_at(now.row, now.law, x);
      if (!accept_token(uniform(i + 1), p, now.draft.prob(x))) break;
    }
    set_residual(1.0f);
    return Left::kNow;
  }

  // The last i with u_i < h_i counts, so the walk goes on after a failure; it ends where w has become 0.
  __device__ Left block_rule() {
    const Remainder& now = state_.now;
    const Span& span = state_.span;
    float w = 1.0f;
    for (int64_t i = 0; i < span.length; ++i) {
      read_target(i);
      read_draft(i);
      set_residual(w);
      if (!now.certain()) find_masses(now);
      const float left = residual_mass(now, state_.mass);
      if (i == 0 || uniform(i) < block_threshold(w, left)) {
        out_.accepted = i;
        by_one([&] { state_.best = now; });
        for (int tile = int(threadIdx.x); tile < tiles(); tile += int(blockDim.x))
          state_.best_mass[tile] = state_.mass[tile];
      }
      w = next_weight(args_.law, now, int32_t(token(i)), w);
      if (w > 0 && i + 1 < span.length) continue;
      if (uniform(i + 1) < w) out_.accepted = span.length;
      break;
    }
    __syncthreads();
    if (out_.accepted < span.length) return Left::kBest;
    if (span.ends_in_eos) return Left::kNothing;
    read_target(out_.accepted);
    return Left::kBonus;
  }

  __device__ int64_t match_rule() {
    const RowLaw& law = state_.now.law;
    for (;; ++out_.accepted) {
      const int64_t i = out_.accepted;
      if (state_.span.ends_in_eos && i == state_.span.length) return Outcome::kNothing;
      read_target(i);
      const int64_t wanted =
          args_.noise_keys && !law.one_hot
              ? noisy_token<kClustered>(state_.now, state_.target.table, args_.noise_keys[state_.span.target_index + i])
              : law.argmax;
      if (i == state_.span.length || token(i) != wanted) return wanted;
    }
  }

  const VerifyChainArgs& args_;
  State& state_;
  const int64_t b_;
  Outcome out_;
};

template <bool kClustered>
__global__ void __launch_bounds__(kWalkThreads, 2)
    verify_walk_kernel(const __grid_constant__ VerifyChainArgs args, bool listed) {
  SPECDEC_DYNAMIC_SHARED(shared);
  SPECDEC_SHARED(State, state, 1);
  Walk<kClustered>(args, blockIdx.x / Team<kClustered>::size(), state[0], listed, reinterpret_cast<float*>(shared))
      .run();
}

}  // namespace

cudaError_t verify_walk(const VerifyChainArgs& args, unsigned cluster, const Launch& launch) {
  const bool listed = may_cut(args.params) || may_cut(args.draft_params);
  const unsigned threads = threads_for((args.target.vocab + kTile - 1) / kTile, kWalkThreads);
  const Shape shape{dim3(unsigned(args.batch) * cluster), dim3(threads), shared_bytes(args, listed), cluster};
  return launch_kernel(cluster > 1 ? verify_walk_kernel<true> : verify_walk_kernel<false>, shape, launch.stream, args,
                       listed);
}

}  // namespace specdec::cuda
