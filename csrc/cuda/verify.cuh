// What both layouts of verify share: where a sequence's block ends, its coins, its draft laws, its output.
#pragma once
#include "common/ids.h"
#include "cuda/mixture.cuh"
#include "cuda/ops.h"

namespace specdec::cuda {

// A sequence's rows and the length of its block: before the first placeholder or invalid id, and after the first EOS, cut
// there before any rule looks at it.
struct Span {
  int64_t batch = 0, first = 0, first_target = 0;  // indices of its first rows in `Rows`
  int64_t draft_index = 0, target_index = 0;       // of its first draft token and target row in the flat arrays
  int64_t draft_row_index = 0;                     // and of its first draft row
  int64_t length = 0;
  int32_t status = 0;
  bool idle = false, ends_in_eos = false;
};

__device__ __forceinline__ int64_t token_at(const VerifyChainArgs& args, const Span& span, int64_t i) {
  return id_at(args.draft_tokens, span.draft_index + i);
}

__device__ __forceinline__ bool has_draft(const VerifyArgs& args) { return args.draft.data || args.draft_probs.data; }

__device__ __forceinline__ bool is_eos(const VerifyArgs& args, int64_t id) {
  for (int64_t e = 0; e < args.num_eos; ++e)
    if (args.eos_token_ids[e] == id) return true;
  return false;
}

// By a whole warp, a draft token a lane; the same in every lane.
__device__ __forceinline__ Span find_span(const VerifyChainArgs& args, int64_t b) {
  Span span;
  int64_t room = args.num_draft;
  if (args.cu) {
    const int64_t start = args.cu[b], stop = args.cu[b + 1];
    if (start < 0 || stop < start || stop > args.total) {
      span.idle = true;
      span.status = kBadParam;
      return span;
    }
    span.draft_index = start;
    span.first_target = span.target_index = start + b;
    span.first = args.law.cascade_bonus ? span.first_target : start;
    if (stop - start > room) span.status |= kBadParam;
    room = min(room, stop - start);
  } else {
    span.batch = b;
    span.draft_index = b * args.num_draft;
    span.target_index = b * (args.num_draft + 1);
  }
  span.draft_row_index = args.law.cascade_bonus ? span.target_index : span.draft_index;
  const int64_t given = args.num_draft_tokens.data ? id_at(args.num_draft_tokens, b) : room;
  if (given > room || given < -1) span.status |= kBadParam;
  span.idle = given < 0;
  if (span.idle) return span;
  const int64_t limit = min(given, room);
  for (int64_t begin = 0; begin < limit; begin += 32) {
    const int64_t i = begin + lane_id(), id = i < limit ? token_at(args, span, i) : 0;
    const bool bad = id < 0 || id >= args.target.vocab;
    const bool eos = i < limit && !bad && is_eos(args, id);
    const unsigned ends = __ballot_sync(kAllLanes, i < limit && (bad || eos));
    if (ends) {
      const int lane = __ffs(int(ends)) - 1;
      span.ends_in_eos = __shfl_sync(kAllLanes, int(eos), lane) != 0;
      span.length = begin + lane + (span.ends_in_eos ? 1 : 0);
      if (__shfl_sync(kAllLanes, int(bad && id != -1), lane)) span.status |= kBadToken;
      return span;
    }
  }
  span.length = limit;
  return span;
}

__device__ __forceinline__ Sampling target_sampling(const VerifyChainArgs& args, int64_t b) {
  const Sampling s = sampling_of(args.params, b);
  return args.acceptance == Acceptance::kGreedy ? made_greedy(s) : s;
}

// The token rule serves a draft that is one-hot in law: in law the block rule is the same there, and it needs no draft.
__device__ __forceinline__ bool by_block(const VerifyChainArgs& args, int64_t b) {
  return args.acceptance == Acceptance::kBlock && has_draft(args) &&
         (args.draft_probs.data || !sampling_of(args.draft_params, b).greedy);
}

__device__ __forceinline__ RowView target_row(const VerifyArgs& args, const Span& span, int64_t i) {
  return row_view(args.target, span.batch, span.first_target + i);
}

__device__ __forceinline__ RowView draft_row(const VerifyArgs& args, const Span& span, int64_t i) {
  return row_view(args.draft.data ? args.draft : args.draft_probs, span.batch, span.first + i);
}

// Whether the laws of the draft's logits are the caller's to tell.
__device__ __forceinline__ bool has_stats(const VerifyArgs& args) { return args.draft.data && args.draft_values; }

// Whether draft rows must be read: to know their laws or raw rows (or, of probabilities, whether one is NaN).
SPECDEC_HD bool reads_draft(const VerifyArgs& args) {
  return args.draft_probs.data || (args.draft.data && (!args.draft_values || is_cascade(args.law.kind)));
}

// How draft rows are read; greedily where not their laws are wanted.
__device__ __forceinline__ Sampling draft_sampling(const VerifyArgs& args, int64_t b) {
  const Sampling s = sampling_of(args.draft_params, b);
  return args.draft_probs.data || has_stats(args) ? made_greedy(s) : s;
}

// How many positions of a sequence may have a draft law, and how many of these have one in a block.
SPECDEC_HD int64_t draft_positions(const VerifyChainArgs& args) {
  return args.num_draft + (args.law.cascade_bonus ? 1 : 0);
}
__device__ __forceinline__ int64_t drafts(const VerifyChainArgs& args, const Span& span) {
  return span.length + (args.law.cascade_bonus && !span.ends_in_eos ? 1 : 0);
}

// Of a row of probabilities read as logits: the one flag that they can set.
__device__ __forceinline__ RowLaw flags_alone(RowLaw law) {
  law.status &= kNaN;
  law.one_hot = false;
  return law;
}

// The draft's law at position i. `read`: the row's law, unless that is the caller's; probabilities have only its status.
// `point`: the id that has all mass where there is no draft.
__device__ __forceinline__ DraftLaw draft_law(const VerifyArgs& args, const Span& span, int64_t b, int64_t i,
                                              const RowLaw& read, int32_t point) {
  DraftLaw draft;
  if (!has_draft(args)) {
    draft.kind = DraftLaw::Kind::kPoint;
    draft.token = point;
    return draft;
  }
  draft.kind = args.draft_probs.data ? DraftLaw::Kind::kProbs : DraftLaw::Kind::kLogits;
  draft.row = draft_row(args, span, i);
  draft.map = args.target_to_draft;
  draft.map_size = args.map_size;
  draft.law = read;
  if (has_stats(args)) {
    const Sampling sampling = sampling_of(args.draft_params, b);
    const int64_t index = span.draft_row_index + i;
    const float* values = args.draft_values + index * kNumValues;
    draft.law.max = values[0];
    draft.law.cutoff = values[1];
    draft.law.normalizer = values[3];
    draft.law.inverse_normalizer = 1.0f / values[3];
    draft.law.inverse_temperature = sampling.inverse_temperature;
    const int64_t argmax = args.draft_argmax[index];  // the caller's: it may be no id of the row
    draft.law.argmax = argmax >= 0 && argmax < draft.row.vocab ? int32_t(argmax) : -1;
    draft.law.status = args.draft_status[index];
    draft.law.one_hot = sampling.greedy || isinf(draft.law.max);
  }
  return draft;
}

__device__ __forceinline__ DraftLaw draft_law(const VerifyChainArgs& args, const Span& span, int64_t b, int64_t i,
                                              const RowLaw& read) {
  return draft_law(args, span, b, i, read, has_draft(args) ? -1 : int32_t(token_at(args, span, i)));
}

// Uniform number i of the sequence (0: the final draw, i >= 1: the coin of draft token i).
__device__ __forceinline__ float uniform_at(const VerifyArgs& args, const Span& span, int64_t i, int32_t* status) {
  const float u = args.uniform_samples ? args.uniform_samples[span.target_index + i] : 0.0f;
  if (is_uniform(u)) return u;
  *status |= kBadParam;
  return 0.0f;
}

// What the rule decided. `final`: the token after the accepted ones, or kNothing.
struct Outcome {
  static constexpr int64_t kNothing = -1;
  int64_t accepted = 0, final = kNothing;
  int32_t status = 0;
};

// The sequence's outputs, by a block.
__device__ __forceinline__ void write_outcome(const VerifyChainArgs& args, const Span& span, int64_t b,
                                              const Outcome& outcome) {
  int64_t* tokens = args.tokens + b * (args.num_draft + 1);
  for (int64_t i = threadIdx.x; i <= args.num_draft; i += blockDim.x)
    tokens[i] = i < outcome.accepted ? token_at(args, span, i) : i == outcome.accepted ? outcome.final : -1;
  if (threadIdx.x != 0) return;
  args.num_accepted[b] = int32_t(outcome.accepted);
  args.num_tokens[b] = int32_t(outcome.accepted + (outcome.final >= 0));
  args.status[b] = outcome.status;
}

// Token rule: whether a draft token is accepted without a look at its coin.
__device__ __forceinline__ bool needs_no_coin(const TargetLaw& law, const Mixture& mixture, const RowView& row,
                                              const DraftLaw& draft, int32_t x) {
  return is_cascade(law.kind) && draft.prob(x) > 0 && keeps(law, mixture, row, draft, x);
}

// Block rule: w after a draft token of the position that the remainder stands at.
inline __device__ __noinline__ float next_weight(const TargetLaw& law, const Remainder& at, int32_t x, float w) {
  const float p = prob_at(at.row, at.law, x), q = at.draft.prob(x);
  const bool kept = is_cascade(law.kind) && keeps(law, at.mixture, at.row, at.draft, x);
  return next_block_weight(w, law_at(law, at.mixture, p, q, kept), q);
}

// Block rule: R_i, what is left of w P at position i after Q, given the masses of its tiles; in every lane of a warp.
__device__ __forceinline__ float residual_mass(const Remainder& left, const float* mass) {
  return left.certain() ? residual_weight(left.scale, left.draft.prob(left.law.argmax))
                        : ordered_sum(mass, left.row.tiles());
}

// The two layouts (see verify.cu for which is taken when), and the measurement beside them.
cudaError_t verify_split(const VerifyChainArgs& args, const Launch& launch);
cudaError_t verify_walk(const VerifyChainArgs& args, unsigned cluster, const Launch& launch);
cudaError_t verify_overlap(const VerifyChainArgs& args, const Launch& launch);

}  // namespace specdec::cuda
