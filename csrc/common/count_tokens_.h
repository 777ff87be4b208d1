// Which of the tokens given for a sequence are counted, and how counts add up.
#pragma once
#include "common/ids.h"

namespace specdec {

// The id of token j of sequence b; if it is not to be counted, INT32_MAX, which stands for "no id" in lists.
SPECDEC_HD int32_t id_to_count(const CountTokensArgs& args, int64_t b, int64_t j) {
  if (j >= args.n || (args.num_tokens.data && j >= id_at(args.num_tokens, b))) return INT32_MAX;
  const int64_t token = id_at(args.tokens, b * args.n + j);
  return token >= 0 && token < INT32_MAX ? int32_t(token) : INT32_MAX;
}

// Counts that TokenCounts did not make may be anything, so sums wrap around.
SPECDEC_HD int32_t plus(int32_t a, int32_t b) { return int32_t(uint32_t(a) + uint32_t(b)); }

}  // namespace specdec
