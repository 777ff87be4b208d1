// verify with a block (or a cluster of them) a sequence: rows are read only as far as the rule gets, and
// both rows of a position once more where a target law needs a measure of them.
#include "cuda/verify_chain.cuh"
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
  Mixing mixing;             // of the present position
  Position now, remembered;  // the present position, and (block rule) where a token may have to be recovered
  bool remembers;
  float *mass, *remembered_mass;  // of their tiles
};

// One sequence. Every thread of every block of the team goes the same way, with the same numbers.
template <bool kClustered>
class Chain {
 public:
  using Group = Team<kClustered>;

  __device__ Chain(const VerifyChainArgs& args, int64_t b, State& state, bool listed, float* shared)
      : args_(args), state_(state), b_(b) {
    const Span span = find_span(args, b);
    float* after_list = shared + (listed ? kMaxListed : 0);
    by_one([&] {
      state.span = span;
      state.remembers = false;
      state.mass = after_list + tiles() * TileTable::kNumbers;
      state.remembered_mass = state.mass + tiles();
      state.target.list = state.draft.list = shared;
      state.target.sampling = target_sampling(args, b);
      state.target.table = TileTable(after_list, tiles());
      state.draft.sampling = draft_sampling(args, b);
      if (reads_draft(args))
        state.draft.table = TileTable(state.remembered_mass + tiles(), draft_row(args, span, 0).tiles());
      state.now.cut = cut_of(state.target.sampling, args.target.vocab).any;
    });
    status_ = span.status;
  }

  __device__ void run() {
    const Outcome outcome = chain_rule(args_, state_.span, b_, *this);
    if (Group::rank() == 0) write_outcome(args_, state_.span, b_, outcome, status_, threadIdx.x, blockDim.x);
    Group::sync();  // no block may end while another could still write into its shared memory
  }

  // ---- What common/chain_rules.h asks of a chain ----

  __device__ int64_t token(int64_t i) const { return token_at(args_, state_.span, i); }
  __device__ float coin(int64_t i) { return uniform(i + 1); }

  __device__ void read_target(int64_t i) {
    by_one([&] { state_.target.row = target_row(args_, state_.span, i); });
    read_row<kClustered>(state_.target, cascade() ? &state_.mixing.target : nullptr);
    by_one([&] {
      state_.mixing.measure = Measure::kNothing;
      state_.now = {state_.target.row, state_.target.law, state_.now.cut};
    });
    status_ |= state_.now.law.status;
  }

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
    status_ |= state_.now.draft.law.status;
  }

  __device__ bool cascade() const { return is_cascade(args_.law.kind); }
  __device__ bool certain() const { return state_.now.law.one_hot && !cascade(); }
  __device__ int64_t argmax() const { return state_.now.law.argmax; }
  __device__ float p(int32_t x) const { return state_.now.p(x); }
  __device__ float q(int32_t x) const { return state_.now.q(x); }
  __device__ bool keeps(int32_t x) {
    if (decides_kept(state_.mixing.measure)) end_mixture();
    return state_.now.keeps(x);
  }
  __device__ float accept() {
    if (cascade()) end_mixture();  // a lossy law's scale is for what is recovered
    return state_.now.mixture.accept;
  }

  __device__ void enter(int64_t i, float w) {
    read_target(i);
    read_draft(i);
    set_residual(w);
    if (!state_.now.certain()) find_masses(state_.now);
  }
  __device__ float residual(int64_t) const { return residual_mass(state_.now, state_.mass); }
  __device__ float next_weight(int64_t i, float w) const {
    return cuda::next_weight(args_.law, state_.now, int32_t(token(i)), w);
  }
  __device__ void remember(int64_t, float) {
    by_one([&] {
      state_.remembered = state_.now;
      state_.remembers = true;
    });
    for (int tile = int(threadIdx.x); tile < tiles(); tile += int(blockDim.x))
      state_.remembered_mass[tile] = state_.mass[tile];
  }

  __device__ int64_t wanted(int64_t i) {
    if (!args_.noise_keys || state_.now.law.one_hot) return argmax();
    return noisy_token<kClustered>(state_.now, state_.target.table, args_.noise_keys[state_.span.target_index + i]);
  }

  __device__ int64_t final_token(Next next, int64_t accepted) {
    if (next == Next::kNothing) return Outcome::kNothing;
    const bool remembered = next == Next::kRecovered && state_.remembers;  // its masses, too
    if (next == Next::kBonus) {
      read_target(accepted);
      if (args_.law.cascade_bonus) {
        read_draft(accepted);
        end_mixture();
        by_one([&] { state_.now.left = cascade_of(state_.now.mixture); });
      }
    } else if (!remembered) {
      set_residual(1.0f);
    }
    Position& from = remembered ? state_.remembered : state_.now;
    if (from.certain()) return from.law.argmax;
    const float u = uniform(0);
    if (!remembered) find_masses(from);
    const int32_t id = draw(from, remembered ? state_.remembered_mass : state_.mass, u);
    if (id >= 0) return id;
    if (remembered && !from.left.mixed) read_target(accepted);  // the table is another row's by now
    by_one([&] { from.take_all(); });
    find_masses(from);
    return max(draw(from, state_.mass, u), 0);
  }

 private:
  __device__ int tiles() const { return (args_.target.vocab + kTile - 1) / kTile; }
  __device__ float uniform(int64_t i) { return uniform_at(args_, state_.span, i, &status_); }

  __device__ void end_mixture() {
    if (state_.mixing.measure != Measure::kNothing)
      end_mixing<kClustered>(args_.law, state_.mixing, state_.now, state_.mass);
  }

  // Leaves at the present position what w times its law has and the draft has not.
  __device__ void set_residual(float w) {
    end_mixture();
    by_one([&] { state_.now.left = residual_of(args_.law, state_.now.mixture, w); });
  }

  __device__ void find_masses(const Position& from) {
    Group::sync();  // the masses may still be in use
    masses_of<kClustered>(from, state_.target.table, state_.mass, int(Group::rank()), int(Group::size()));
    Group::sync();
  }

  const VerifyChainArgs& args_;
  State& state_;
  const int64_t b_;
  int32_t status_;
};

template <bool kClustered>
__global__ void __launch_bounds__(kWalkThreads, 2)
    verify_walk_kernel(const __grid_constant__ VerifyChainArgs args, bool listed) {
  SPECDEC_DYNAMIC_SHARED(shared);
  SPECDEC_SHARED(State, state, 1);
  Chain<kClustered>(args, blockIdx.x / Team<kClustered>::size(), state[0], listed, reinterpret_cast<float*>(shared))
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
