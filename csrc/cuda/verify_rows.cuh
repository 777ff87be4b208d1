// The rows of one sequence in a verify step: where its span ends, its target rows, its draft laws.
#pragma once
#include "common/chain_rules.h"
#include "cuda/mixture.cuh"
#include "cuda/ops.h"

namespace specdec::SPECDEC_CUDA_ROWS {

// By a whole warp, one draft token per lane; the same result in every lane.
struct WarpSearch {
  template <class EndAt>
  __device__ __forceinline__ FoundEnd operator()(int64_t limit, EndAt end_at) const {
    for (int64_t begin = 0; begin < limit; begin += 32) {
      const int64_t i = begin + lane_id();
      const End end = i < limit ? end_at(i) : End::kNone;
      const unsigned ends = __ballot_sync(kAllLanes, end != End::kNone);
      if (!ends) continue;
      const int lane = __ffs(int(ends)) - 1;
      return {begin + lane, End(__shfl_sync(kAllLanes, int32_t(end), lane))};
    }
    return {limit, End::kNone};
  }
};

__device__ __forceinline__ Span find_span(const VerifyChainArgs& args, int64_t b) {
  return find_span(args, b, WarpSearch{});
}

// With processors applied, once the block knows the sequence's overlay.
__device__ __forceinline__ RowView target_row(const VerifyArgs& args, const Span& span, int64_t i) {
  RowView row = row_view(args.target, span.batch, span.first_target + i);
  row.lay_over(i);
  return row;
}

__device__ __forceinline__ RowView draft_row(const VerifyArgs& args, const Span& span, int64_t i) {
  return row_view(rows_of_draft(args), span.draft_batch, span.first_draft + i);
}

// Tiles of a draft row; 0 without a draft.
inline int draft_tiles(const VerifyArgs& args) { return has_draft(args) ? tiles_of(rows_of_draft(args).vocab) : 0; }

// Whether draft rows must be read: for their laws or raw rows (or, for probabilities, to see whether they are a law).
SPECDEC_HD bool reads_draft(const VerifyArgs& args) {
  return args.draft_probs.data || (args.draft.data && (!args.draft_values || is_cascade(args.law.kind)));
}

// For match and greedy the target alone decides.
SPECDEC_HD bool reads_draft(const VerifyChainArgs& args) {
  return !by_match(args) && reads_draft(static_cast<const VerifyArgs&>(args));
}

// Whether draft rows are read greedily, as their laws are not needed.
SPECDEC_HD bool reads_greedily(const VerifyArgs& args) { return args.draft_probs.data || has_stats(args); }

__device__ __forceinline__ Sampling draft_sampling(const VerifyArgs& args, int64_t b) {
  const Sampling s = sampling_of(args.draft_params, b);
  return reads_greedily(args) ? made_greedy(s) : s;
}

// The law of a row of probabilities, from the sum of its masses and what find_law made of it: without flags, or no_law.
__device__ __forceinline__ RowLaw law_of_probs(RowLaw read, float total) {
  const int32_t status = read.status & kNaN;
  if (status || !is_distribution(total)) return no_law(status);
  read.status = 0;
  read.one_hot = false;
  return read;
}

// The draft's law at position i. `read`: the law found for the row, unused if the caller gave it; see law_of_probs.
// `point`: the id with all mass if there is no draft.
__device__ __forceinline__ DraftLaw draft_law(const VerifyArgs& args, const Span& span, int64_t b, int64_t i,
                                              const RowLaw& read, int32_t point) {
  DraftLaw draft;
  if (!has_draft(args)) {
    draft.kind = DraftLaw::Kind::kPoint;
    draft.token = point;
    return draft;
  }
  const bool probs = args.draft_probs.data && !(read.status & kBadDraft);  // else no_law tells
  draft.kind = probs ? DraftLaw::Kind::kProbs : DraftLaw::Kind::kLogits;
  draft.row = draft_row(args, span, i);
  draft.map = args.target_to_draft;
  draft.map_size = args.map_size;
  draft.law = has_stats(args) ? kept_draft_law(args, span, b, i) : read;
  return draft;
}

__device__ __forceinline__ DraftLaw draft_law(const VerifyChainArgs& args, const Span& span, int64_t b, int64_t i,
                                              const RowLaw& read) {
  return draft_law(args, span, b, i, read, point_at(args, span, i));
}

}  // namespace specdec::SPECDEC_CUDA_ROWS
