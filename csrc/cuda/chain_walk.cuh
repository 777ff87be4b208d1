// A chain whose rows one block or cluster reads one after the other: its answers to common/chain_rules.h.
#pragma once
#include "cuda/verify_chain.cuh"
#include "cuda/walk.cuh"

namespace specdec::SPECDEC_CUDA_ROWS {

struct ChainState : WalkState {
  Position remembered;  // block rule: where a token may have to be recovered; its masses are in other_mass
  bool remembers;
};

template <bool kClustered>
class Chain : public WalkRows<kClustered> {
  using Base = WalkRows<kClustered>;

 public:
  using typename Base::Group;

  __device__ Chain(const VerifyChainArgs& args, int64_t b, ChainState& state, float* list, float* numbers)
      : Base(args, b, find_span(args, b), target_sampling(args, b), state, list, numbers), args_(args), state_(state) {
    find_overlay(args.processors, b, mask_index(args, state.span, b), drafted_of(args, state.span));
    by_one([&] { state.remembers = false; });
  }

  __device__ void run() {
    const Outcome outcome = chain_rule(args_, state_.span, this->b_, *this);
    if (Group::rank() == 0) write_outcome(args_, state_.span, this->b_, outcome, status_, threadIdx.x, blockDim.x);
    Group::sync();  // no block may end while another could still write into its shared memory
  }

  // ---- What common/chain_rules.h asks of a chain ----

  __device__ int64_t token(int64_t i) const { return token_at(args_, state_.span, i); }
  __device__ double coin(int64_t i) { return uniform(i + 1); }

  __device__ void read_draft(int64_t i) { Base::read_draft(i, point_at(args_, state_.span, i)); }

  __device__ void end_before(int64_t i) {
    by_one([&] { specdec::end_before(state_.span, i); });
    status_ |= kBadDraft;
  }

  __device__ bool one_hot() const { return state_.now.law.one_hot; }
  __device__ int64_t argmax() const { return state_.now.law.argmax; }
  __device__ float p(int32_t x) const { return state_.now.p(x); }
  __device__ float q(int32_t x) const { return state_.now.q(x); }
  __device__ bool keeps(int32_t x) {
    if (decides_kept(state_.mixing.measure)) end_mixture();
    return state_.now.keeps(x);
  }
  __device__ float accept() {
    if (this->cascade()) end_mixture();  // a lossy law's scale matters only for a recovered token
    return state_.now.mixture.accept;
  }

  __device__ void enter(int64_t i, float w) {
    this->read_target(i);
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
      state_.other_mass[tile] = state_.mass[tile];
  }

  __device__ int64_t wanted(int64_t i) { return has_noise(args_) && !one_hot() ? this->noisy(i) : argmax(); }

  __device__ int64_t final_token(Next next, int64_t accepted) {
    if (next == Next::kNothing) return Outcome::kNothing;
    const bool remembered = next == Next::kRecovered && state_.remembers;  // and so are its masses
    if (next == Next::kBonus) {
      this->read_target(accepted);
      if (args_.law.cascade_bonus) {
        read_draft(accepted);
        this->set_cascade();
      }
    } else if (!remembered) {
      set_residual(1.0f);
    }
    Position& from = remembered ? state_.remembered : state_.now;
    if (from.certain()) return from.law.argmax;
    const double u = uniform(0);
    if (!remembered) find_masses(from);
    return this->draw_left(from, remembered ? state_.other_mass : state_.mass, u, [&] {
      if (remembered) this->read_target(accepted);
    });
  }

 protected:
  using Base::status_, Base::tiles, Base::uniform, Base::end_mixture, Base::find_masses;

  // Makes the remainder at the present position w times its law minus the draft's, where positive.
  __device__ void set_residual(float w) {
    end_mixture();
    by_one([&] { state_.now.left = residual_of(args_.law, state_.now.mixture, w); });
  }

  const VerifyChainArgs& args_;
  ChainState& state_;
};

}  // namespace specdec::SPECDEC_CUDA_ROWS
