#include "host/text_index.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <stdexcept>

namespace specdec::host {
namespace {

// The hash of a gram extended to the left by one token. The slot is taken from the high bits, which depend on all bits of
// the product's factors; the shift brings them back down for the next token.
std::uint64_t extend_hash(std::uint64_t hash, Token token) {
  hash = (hash + static_cast<std::uint32_t>(token) + 1) * 0x9E3779B97F4A7C15u;  // 2^64 / golden ratio
  return hash ^ (hash >> 32);
}

}  // namespace

template <class Visit>
void TextIndex::for_each_gram(const std::vector<Token>& tokens, std::size_t end, Visit visit) const {
  const std::size_t longest = std::min(max_ngram_, end);
  std::uint64_t hash = 0;
  for (std::size_t length = 1; length <= longest; ++length) {
    const Token token = tokens[end - length];
    if (token == kSeparator) return;
    hash = extend_hash(hash, token);
    if (length >= min_ngram_ && !visit(length, hash)) return;
  }
}

std::size_t TextIndex::find(const Token* gram_end, std::size_t length, std::uint64_t hash) const {
  const std::size_t slots = 2 * capacity_;
  const std::size_t table = (length - min_ngram_) * slots;
  std::size_t slot = hash >> (64 - std::countr_zero(slots));
  while (true) {
    const std::uint32_t end = latest_[table + slot];
    if (end == 0 || std::equal(gram_end - length, gram_end, tokens_.data() + end - length)) return table + slot;
    slot = (slot + 1) & (slots - 1);
  }
}

void TextIndex::reserve(std::size_t count) {
  if (count > std::numeric_limits<Token>::max() - tokens_.size()) {
    throw std::length_error("a text of the n-gram index may hold 2147483647 tokens");
  }
  const std::size_t needed = tokens_.size() + count;
  if (needed <= capacity_) return;
  const std::size_t capacity = std::bit_ceil(std::max<std::size_t>(needed, 16));
  std::vector<std::uint32_t> latest(num_lengths() * 2 * capacity);
  tokens_.reserve(capacity);
  previous_.reserve(num_lengths() * capacity);
  latest_ = std::move(latest);
  capacity_ = capacity;
  // In the order of the text: a gram's slot must depend only on grams that are older, or undoing an append could empty
  // the slot that an older gram's probing passes through.
  for (std::size_t end = 0; end < tokens_.size(); ++end) index_end(end);
}

void TextIndex::push(Token token) {
  tokens_.push_back(token);
  previous_.resize(tokens_.size() * num_lengths());
  index_end(tokens_.size() - 1);
}

void TextIndex::truncate(std::size_t length) {
  while (tokens_.size() > length) {
    unindex_end(tokens_.size() - 1);
    tokens_.pop_back();
    previous_.resize(tokens_.size() * num_lengths());
  }
}

void TextIndex::index_end(std::size_t end) {
  if (tokens_[end] == kSeparator) return;  // nothing follows the last grams of a document
  for_each_gram(tokens_, end, [&](std::size_t length, std::uint64_t hash) {
    const std::size_t slot = find(tokens_.data() + end, length, hash);
    previous_[end * num_lengths() + length - min_ngram_] = latest_[slot];
    latest_[slot] = static_cast<std::uint32_t>(end);
    return true;
  });
}

void TextIndex::unindex_end(std::size_t end) {
  if (tokens_[end] == kSeparator) return;
  for_each_gram(tokens_, end, [&](std::size_t length, std::uint64_t hash) {
    const std::size_t slot = find(tokens_.data() + end, length, hash);
    latest_[slot] = previous_[end * num_lengths() + length - min_ngram_];
    return true;
  });
}

template <class Visit>
void TextIndex::for_each_match(const std::vector<Token>& tokens, Visit visit) const {
  if (tokens_.empty()) return;
  for_each_gram(tokens, tokens.size(), [&](std::size_t length, std::uint64_t hash) {
    const std::size_t end = latest_[find(tokens.data() + tokens.size(), length, hash)];
    if (end != 0) visit(Match{length, end});
    return end != 0;  // a longer gram contains this one
  });
}

Match TextIndex::longest_match(const std::vector<Token>& tokens) const {
  Match longest;
  for_each_match(tokens, [&](Match match) { longest = match; });
  return longest;
}

std::vector<Match> TextIndex::matches() const {
  std::vector<Match> found;
  for_each_match(tokens_, [&](Match match) { found.push_back(match); });
  return found;
}

Match TextIndex::before(Match match) const {
  const std::size_t end = previous_[match.end * num_lengths() + match.length - min_ngram_];
  return end == 0 ? Match{} : Match{match.length, end};
}

}  // namespace specdec::host
