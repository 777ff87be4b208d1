#include "host/ngram_counts.h"

#include <algorithm>

namespace specdec::host {
namespace {

// The key of a context, computed as `_hash` of specdec_kernels/drafters/ngram_table.py does.
std::uint64_t context_key(std::span<const Token> context) {
  std::uint64_t key = 0;
  for (const Token token : context) {
    key = (key ^ static_cast<std::uint64_t>(token)) * 0x9E3779B97F4A7C15u;  // 2^64 / golden ratio
    key ^= key >> 29;
  }
  return key;
}

std::size_t num_distinct(std::vector<Token> tokens) {
  std::sort(tokens.begin(), tokens.end());
  return static_cast<std::size_t>(std::unique(tokens.begin(), tokens.end()) - tokens.begin());
}

}  // namespace

void append_terms(const TextIndex& text, std::span<const Contexts> table, std::vector<Term>& terms) {
  double rest = 1.0;  // the mass that the contexts so far leave to shorter ones
  const std::vector<Token>& tokens = text.tokens();
  std::vector<Token> following;
  const std::vector<Match> matches = text.matches();
  for (auto latest = matches.rbegin(); latest != matches.rend(); ++latest) {
    following.clear();
    for (Match match = *latest; match.length != 0; match = text.before(match)) following.push_back(tokens[match.end]);
    const double kinds = static_cast<double>(num_distinct(following));
    const double share = rest / (static_cast<double>(following.size()) + kinds);
    for (const Token token : following) terms.push_back({token, share});
    rest = share * kinds;
  }
  for (std::size_t length = std::min(table.size(), tokens.size()); length > 0; --length) {
    const Contexts& contexts = table[length - 1];
    const std::uint64_t key = context_key(std::span(tokens).last(length));
    const auto found = std::lower_bound(contexts.keys.begin(), contexts.keys.end(), key);
    if (found == contexts.keys.end() || *found != key) continue;
    const auto context = static_cast<std::size_t>(found - contexts.keys.begin());
    const double kinds = contexts.kinds[context];
    const double share = rest / (contexts.totals[context] + kinds);
    const auto entries = static_cast<std::int64_t>(contexts.ids.size());
    const std::int64_t last = std::min(contexts.starts[context + 1], entries);
    for (std::int64_t i = std::max<std::int64_t>(contexts.starts[context], 0); i < last; ++i) {
      terms.push_back({contexts.ids[i], share * contexts.counts[i]});
    }
    rest = share * kinds;
  }
}

}  // namespace specdec::host
