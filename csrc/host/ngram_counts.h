// What followed a text's last tokens earlier: in the text itself, and in a table of counts. No Python here: the binding
// is bind_host.cpp, the specification specdec_kernels/_host_py.py.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "host/text_index.h"

namespace specdec::host {

// The contexts of one length in a table, as `Order` of specdec_kernels/drafters/ngram_table.py.
struct Contexts {
  std::span<const std::uint64_t> keys;   // [num_contexts], ascending
  std::span<const std::int32_t> totals;  // [num_contexts]
  std::span<const std::int32_t> kinds;   // [num_contexts]
  std::span<const std::int64_t> starts;  // [num_contexts + 1]
  std::span<const std::int32_t> ids;     // [num_entries]
  std::span<const std::int32_t> counts;  // [num_entries]
};

// What one occurrence, or one entry of a table, adds to the distribution.
struct Term {
  Token id;
  double weight;
};

// Appends to `terms` the distribution of the token after `text` by Witten and Bell's interpolation (1991): from the
// longest context in the text itself to the shortest, then those of the table. The weights add up to less than 1 by the
// share of tokens that were never seen.
void append_terms(const TextIndex& text, std::span<const Contexts> table, std::vector<Term>& terms);

}  // namespace specdec::host
