// What token_logprobs reports for a slot, and for an id.
#pragma once
#include "common/ids.h"
#include "common/law.h"
#include "common/processors.h"

namespace specdec {

// The token at a place of a sequence, and its row; the token is -1 where there is none to look at.
struct TokenSlot {
  int64_t b, place, row;
  int32_t token, status;
};

// What processors count before a place.
SPECDEC_HD Drafted tokens_of(const TokenLogprobsArgs& args, int64_t b) { return {{args.tokens, true}, b * args.width}; }

SPECDEC_HD TokenSlot token_slot(const TokenLogprobsArgs& args, int64_t index) {
  const int64_t b = index / args.width, j = index % args.width;
  const int64_t token = args.num_tokens.data && j >= id_at(args.num_tokens, b) ? -1 : args.tokens[index];
  const int64_t row = args.rows ? args.rows[index] : j;
  if (token == -1) return {b, j, 0, -1, 0};
  const int32_t status =
      (token < 0 || token >= args.logits.vocab ? kBadToken : 0) | (row < 0 || row >= args.n ? kBadParam : 0);
  return {b, j, row, status ? -1 : int32_t(token), status};
}

// A row's distribution after processors, temperature and truncation, and the raw one.
struct LogLaws {
  RowLaw law;
  float log_normalizer;               // of exp((logit - max) / T) over what is kept
  float raw_max, raw_log_normalizer;  // of the logits as they are given; of exp(logit) over the row
  int32_t raw_argmax;
};

// log P of an id with processed logit x, also where P itself would be too small for float32.
SPECDEC_HD float log_prob_of(const LogLaws& laws, float x, int32_t id) {
  const RowLaw& law = laws.law;
  if (law.one_hot) return id == law.argmax ? 0.0f : -INFINITY;
  return x >= law.cutoff ? (x - law.max) * law.inverse_temperature - laws.log_normalizer : -INFINITY;
}
SPECDEC_HD float raw_log_prob_of(const LogLaws& laws, float x, int32_t id) {
  if (isinf(laws.raw_max)) return id == laws.raw_argmax ? 0.0f : -INFINITY;
  return x - laws.raw_log_normalizer;
}

// An id's logit: as it is given, and as processors make it.
struct Logit {
  float raw, processed;
};

SPECDEC_HD void write_token(const TokenLogprobsArgs& args, int64_t index, const LogLaws& laws, Logit x, int32_t token,
                            int32_t rank) {
  args.raw_log_prob[index] = raw_log_prob_of(laws, x.raw, token);
  args.log_prob[index] = log_prob_of(laws, x.processed, token);
  args.rank[index] = rank;
  args.status[index] = laws.law.status;
}

// Writes the place-th likeliest id.
SPECDEC_HD void write_top(const TokenLogprobsArgs& args, int64_t index, int place, const LogLaws& laws, Logit x,
                          int32_t id) {
  const int64_t at = index * args.num_top + place;
  args.top_ids[at] = id;
  args.top_log_prob[at] = raw_log_prob_of(laws, x.raw, id);
  args.top_processed_log_prob[at] = log_prob_of(laws, x.processed, id);
}

// Writes that there are no ids from that place on.
SPECDEC_HD void write_no_top(const TokenLogprobsArgs& args, int64_t index, int place) {
  for (int64_t at = index * args.num_top + place; at < (index + 1) * args.num_top; ++at) {
    args.top_ids[at] = -1;
    args.top_log_prob[at] = args.top_processed_log_prob[at] = -INFINITY;
  }
}

SPECDEC_HD void write_no_token(const TokenLogprobsArgs& args, int64_t index, int32_t status) {
  args.raw_log_prob[index] = args.log_prob[index] = -INFINITY;
  args.rank[index] = 0;
  args.status[index] = status;
  write_no_top(args, index, 0);
}

}  // namespace specdec
