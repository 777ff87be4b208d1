// The verdict on one draft token, given its position's laws and mixture.
#pragma once
#include "cuda/rows.cuh"
#include "cuda/verify_chain.cuh"

namespace specdec::cuda {

// A draft token, and everything about it that depends on no law of its position.
struct DraftToken {
  int32_t id, status_of_coin;
  float logit, q;  // the target's logit of it, and Q of it
  double coin;
};

__device__ __forceinline__ void find_coin(const VerifyChainArgs& args, const Span& span, int64_t b, int64_t i,
                                          DraftToken& token) {
  token.id = int32_t(token_at(args, span, i));
  token.status_of_coin = 0;
  token.coin = uniform_at(args, span, b, i + 1, &token.status_of_coin);
}
__device__ __forceinline__ void find_logit(const VerifyChainArgs& args, const Span& span, int64_t i,
                                           DraftToken& token) {
  token.logit = logit_at(target_row(args, span, i), int32_t(token_at(args, span, i)));
}
__device__ __forceinline__ void find_q(const VerifyChainArgs& args, const Span& span, int64_t i, const DraftLaw& draft,
                                       DraftToken& token) {
  token.q = draft.prob(int32_t(token_at(args, span, i)));
}

// A position that one thread looks at, its laws and mixture known: its answers to common/chain_rules.h.
class Judge {
 public:
  __device__ Judge(const Position& at, const DraftToken& token) : mixture(at.mixture), at_(at), token_(token) {}

  const Mixture& mixture;
  int32_t status = 0;

  __device__ int64_t token(int64_t) const { return token_.id; }
  __device__ void read_target(int64_t) { status |= at_.law.status; }
  __device__ void read_draft(int64_t) { status |= at_.draft.law.status; }
  __device__ bool one_hot() const { return at_.law.one_hot; }
  __device__ int64_t argmax() const { return at_.law.argmax; }
  __device__ float p(int32_t id) const { return prob_in(token_.logit, at_.law, id); }
  __device__ float q(int32_t) const { return token_.q; }
  __device__ bool keeps(int32_t id) const { return at_.keeps(id); }
  __device__ float accept() const { return mixture.accept; }
  __device__ double coin(int64_t) {
    status |= token_.status_of_coin;
    return token_.coin;
  }

 private:
  const Position& at_;
  const DraftToken& token_;
};

// A row that has been read, and what is known of its draft token; in shared memory, as its readers have few registers.
struct Trial {
  Span span;
  Reading read;
  Position at;
  DraftToken token;
};

// The law of an uncut row from its table; false if that takes more than one look. By one warp.
inline __device__ __noinline__ bool find_law_from_table(Trial& trial) {
  float mass[kLeaves];
  return plain_law(trial.read.row, trial.read.sampling, trial.read.table, mass, &trial.at.law);
}

// By one thread, given the row's law.
inline __device__ __noinline__ bool is_rejected(const VerifyChainArgs& args, int64_t b, int64_t i, Trial& trial) {
  trial.at.draft = draft_law(args, trial.span, b, i, RowLaw{});
  find_coin(args, trial.span, b, i, trial.token);
  find_logit(args, trial.span, i, trial.token);
  find_q(args, trial.span, i, trial.at.draft, trial.token);
  Judge judge(trial.at, trial.token);
  return judge_by_token(args, judge, i) != Verdict::kAccepted;
}

// Whether the draft token of a row that was read is rejected, whatever comes before it: by coins for uncut rows, and
// greedily. False if the row's table alone does not tell. The result is in lane 0 of a warp; the trial's span is known.
__device__ __forceinline__ bool is_rejected(const VerifyChainArgs& args, const Mixture& mixture, int64_t b, int64_t i,
                                            float* tables, Trial& trial) {
  Reading& read = trial.read;
  if (lane_id() == 0) {
    read.row = target_row(args, trial.span, i);
    read.sampling = target_sampling(args, b);
    read.table = table_of(tables, trial.span.target_index + i, read.row.tiles());
    trial.at.row = read.row;
    trial.at.mixture = mixture;
  }
  __syncwarp();
  if (!read.sampling.greedy) return find_law_from_table(trial) && lane_id() == 0 && is_rejected(args, b, i, trial);
  float max = -INFINITY;
  for (int tile = lane_id(); tile < read.row.tiles(); tile += 32) max = fmaxf(max, read.table.max[tile]);
  max = warp_max(max);
  return lane_id() == 0 && logit_at(read.row, int32_t(token_at(args, trial.span, i))) < max;
}

}  // namespace specdec::cuda
