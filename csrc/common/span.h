// The span of a sequence, i.e. the drafted extent that the rules look at: where its rows are, how long it is, what is
// given for it besides logits, and where the outcome goes.
#pragma once
#include "common/ids.h"
#include "common/philox.h"
#include "common/processors.h"
#include "common/row_stats.h"

namespace specdec {

struct Span {
  int64_t batch = 0, first_target = 0, first_draft = 0;  // indices of its first rows in `Rows`
  int64_t draft_batch = 0;                               // replaces `batch` for the draft's rows
  int64_t target_index = 0, draft_index = 0;             // the same in the flat arrays
  int64_t token_index = 0;                               // of its first draft token
  int64_t length = 0;                                    // draft tokens that the rules look at
  int32_t status = 0;
  bool idle = false;
  bool closed = false;       // nothing is drawn after its last token
  bool takes_bonus = false;  // closed because a given bonus token follows
};

SPECDEC_HD bool has_draft(const VerifyArgs& args) { return args.draft.data || args.draft_probs.data; }

// The draft's rows, logits or probabilities; data is null if there are none.
SPECDEC_HD const Rows& rows_of_draft(const VerifyArgs& args) { return args.draft.data ? args.draft : args.draft_probs; }

// Whether the caller gave the stats of the draft's logits.
SPECDEC_HD bool has_stats(const VerifyArgs& args) { return args.draft.data && args.draft_values; }

SPECDEC_HD bool is_eos(const VerifyArgs& args, int64_t id) {
  for (int64_t e = 0; e < args.num_eos; ++e)
    if (args.eos_token_ids[e] == id) return true;
  return false;
}

SPECDEC_HD int64_t step_of(const Coins& coins, int64_t b) { return coins.steps ? coins.steps[b] : coins.step; }

SPECDEC_HD_OUT_OF_LINE double coin_of(const Coins& coins, int64_t b, int64_t i) {
  return uniform_sample(coins.seeds[b], step_of(coins, b), kAcceptPurpose, uint32_t(i));
}

// Uniform number i of sequence b (in a chain, 0 is for the final draw and i >= 1 is the coin of draft token i); calls
// without uniforms are greedy.
SPECDEC_HD double uniform_at(const VerifyArgs& args, const Span& span, int64_t b, int64_t i, int32_t* status) {
  if (args.coins.seeds) return coin_of(args.coins, b, i);
  return args.uniform_samples.data ? uniform_of(args.uniform_samples, span.target_index + i, status) : 0.0;
}

// Whether there is noise, and the noise key of row i of sequence b.
SPECDEC_HD bool has_noise(const VerifyArgs& args) { return args.noise_keys || args.coins.positions.data; }

SPECDEC_HD int64_t key_at(const VerifyArgs& args, const Span& span, int64_t b, int64_t i) {
  const int64_t index = span.target_index + i;
  if (args.noise_keys) return args.noise_keys[index];
  const Coins& coins = args.coins;
  return noise_key(coins.seeds[b], id_at(coins.positions, index), step_of(coins, b), kSamplePurpose);
}

// The law of draft row i of sequence b where has_stats.
SPECDEC_HD RowLaw kept_draft_law(const VerifyArgs& args, const Span& span, int64_t b, int64_t i) {
  const int64_t index = span.draft_index + i;
  return kept_law(args.draft_values + index * kNumValues, args.draft_argmax[index], args.draft_status[index],
                  sampling_of(args.draft_params, b), args.draft.vocab);
}

// ---- Of chains ----

SPECDEC_HD int64_t token_at(const VerifyChainArgs& args, const Span& span, int64_t i) {
  return id_at(args.draft_tokens, span.token_index + i);
}

// The token that has all of Q's mass if there is no draft; -1 if there is one.
SPECDEC_HD int32_t point_at(const VerifyChainArgs& args, const Span& span, int64_t i) {
  return has_draft(args) ? -1 : int32_t(token_at(args, span, i));
}

SPECDEC_HD Drafted drafted_of(const VerifyChainArgs& args, const Span& span) {
  Drafted out{};
  out.tokens = args.draft_tokens;
  out.first = span.token_index;
  return out;
}

SPECDEC_HD Sampling target_sampling(const VerifyChainArgs& args, int64_t b) {
  const Sampling s = sampling_of(args.params, b);
  return args.acceptance == Acceptance::kGreedy ? made_greedy(s) : s;
}

// Target rows of a sequence besides those of its draft tokens: the one that a bonus is drawn from.
SPECDEC_HD int64_t bonus_rows(const VerifyChainArgs& args) { return args.bonus_tokens.data ? 0 : 1; }

// The number of sequence b's first target row among all target rows, each of which has a row in a bitmask.
SPECDEC_HD int64_t mask_index(const VerifyChainArgs& args, const Span& span, int64_t b) {
  return span.token_index + b * bonus_rows(args);
}

// How a draft token ends the span: before a placeholder (-1) or an invalid id, and after an EOS; it is cut there before
// any rule looks at it.
enum class End : int32_t { kNone, kEos, kPlaceholder, kBadToken };

SPECDEC_HD End end_at(const VerifyChainArgs& args, const Span& span, int64_t i) {
  const int64_t id = token_at(args, span, i);
  if (id < 0 || id >= args.target.vocab) return id == -1 ? End::kPlaceholder : End::kBadToken;
  return is_eos(args, id) ? End::kEos : End::kNone;
}

struct FoundEnd {
  int64_t position;
  End end;
};

// The span of sequence b before its end is known; `room` is the most draft tokens it can have. Idle if the arguments
// leave no place for it.
SPECDEC_HD Span begin_span(const VerifyChainArgs& args, int64_t b, int64_t* room) {
  Span span;
  *room = args.num_draft;
  if (args.cu) {
    const int64_t start = args.cu[b], stop = args.cu[b + 1];
    if (start < 0 || stop < start || stop > args.total) {
      span.idle = true;
      span.status = kBadParam;
      return span;
    }
    span.token_index = start;
    span.target_index = start + b;
    span.first_target = mask_index(args, span, b);
    span.first_draft = args.law.cascade_bonus ? span.first_target : start;
    const bool loose =
        (b == 0 && start != 0) || (b + 1 == args.batch && stop != args.total);  // tokens without a sequence
    if (loose || stop - start > *room) span.status |= kBadParam;
    *room = stop - start < *room ? stop - start : *room;
  } else {
    span.batch = b;
    span.token_index = b * args.num_draft;
    span.target_index = b * (args.num_draft + 1);
  }
  span.draft_index = args.law.cascade_bonus ? span.target_index : span.token_index;
  span.draft_batch = span.batch;
  if (args.draft_of.of.data) {
    span.draft_batch = named_batch(args.draft_of, b);
    span.first_draft = 0;
    span.idle = span.draft_batch < 0;
    if (span.idle) span.status |= kBadParam;
  }
  return span;
}

// Finds the span's end. A given bonus follows the whole draft; a draft that ends before a token has a row there to draw
// from. search(limit, end_at) gives the first position below `limit` with an end, or {limit, kNone}.
template <class Search>
SPECDEC_RULE void end_span(const VerifyChainArgs& args, int64_t b, int64_t room, Search search, Span& span) {
  const int64_t given = args.num_draft_tokens.data ? id_at(args.num_draft_tokens, b) : room;
  if (given > room || given < -1) span.status |= kBadParam;
  span.idle = given < 0;
  if (span.idle) return;
  const FoundEnd found = search(given < room ? given : room, [&](int64_t i) { return end_at(args, span, i); });
  const bool eos = found.end == End::kEos;
  span.length = found.position + (eos ? 1 : 0);
  span.takes_bonus = args.bonus_tokens.data && found.end == End::kNone;
  span.closed = eos || span.takes_bonus;
  if (found.end == End::kBadToken) span.status |= kBadToken;
}

// Ends the span before token i, which Q cannot have produced; the caller flags kBadDraft.
SPECDEC_HD void end_before(Span& span, int64_t i) {
  span.length = i;
  span.closed = span.takes_bonus = false;
}

template <class Search>
SPECDEC_RULE Span find_span(const VerifyChainArgs& args, int64_t b, Search search) {
  int64_t room;
  Span span = begin_span(args, b, &room);
  if (!span.idle) end_span(args, b, room, search, span);
  return span;
}

// Rows of a sequence whose target law may be wanted, and those whose draft law may be: including the bonus' row if
// there is one.
SPECDEC_HD int64_t target_rows(const Span& span) { return span.length + (span.closed ? 0 : 1); }
SPECDEC_HD int64_t draft_rows(const VerifyChainArgs& args, const Span& span) {
  return args.law.cascade_bonus ? target_rows(span) : span.length;
}

// What a rule decided: how many draft tokens are accepted, and the token drawn after them (or kNothing).
struct Outcome {
  static constexpr int64_t kNothing = -1;
  int64_t accepted = 0, final = kNothing;
};

// Writes the outputs of sequence b, as worker `worker` of `workers`. A given bonus follows a draft that was accepted
// whole; a placeholder (-1) is no bonus.
SPECDEC_HD void write_outcome(const VerifyChainArgs& args, const Span& span, int64_t b, const Outcome& outcome,
                              int32_t status, int64_t worker, int64_t workers) {
  int64_t final = outcome.final;
  if (span.takes_bonus && outcome.accepted == span.length) {
    final = id_at(args.bonus_tokens, b);
    if (final < -1 || final >= args.target.vocab) {
      status |= kBadToken;
      final = Outcome::kNothing;
    }
  }
  int64_t* tokens = args.tokens + b * (args.num_draft + 1);
  for (int64_t i = worker; i <= args.num_draft; i += workers)
    tokens[i] = i < outcome.accepted ? token_at(args, span, i) : i == outcome.accepted ? final : -1;
  if (worker != 0) return;
  args.num_accepted[b] = int32_t(outcome.accepted);
  args.num_tokens[b] = int32_t(outcome.accepted + (final >= 0));
  args.status[b] = status;
}

}  // namespace specdec
