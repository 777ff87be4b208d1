// One growing text with an index of its n-grams. No Python here: the binding is bind_host.cpp, the specification
// specdec_kernels/_host_py.py.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace specdec::host {

using Token = std::int32_t;

// Stands between the documents of a corpus. It is no token, so no match spans two documents.
inline constexpr Token kSeparator = -1;

// The latest occurrence of a gram: `length` tokens that end before `end`. length == 0: there is none.
struct Match {
  std::size_t length = 0;
  std::size_t end = 0;
};

// For each gram length one open-addressing table holds the end of every gram's latest occurrence. A slot is four bytes:
// the gram itself is read from the text, so lookups are exact and a hash collision costs time, never a wrong answer.
// Each end also keeps, per gram length, the occurrence before it. That chain undoes an append, and lists a gram's
// occurrences latest first.
//
// Ends are exclusive; 0 can end no gram and means "none". Grams that end at the end of the text are indexed once a token
// follows them, so that looking up the text's own suffix finds only earlier occurrences.
class TextIndex {
 public:
  TextIndex(std::size_t min_ngram, std::size_t max_ngram) : min_ngram_(min_ngram), max_ngram_(max_ngram) {}

  const std::vector<Token>& tokens() const { return tokens_; }

  // Makes room for `count` more tokens. Throws, and changes nothing, if there is none.
  void reserve(std::size_t count);
  // Appends a token or kSeparator; there must be room.
  void push(Token token);
  void truncate(std::size_t length);

  // The latest occurrence in this text of the longest suffix of `tokens`, which may be this text's own.
  Match longest_match(const std::vector<Token>& tokens) const;
  // The latest occurrence of each suffix of this text that occurred earlier, shortest first.
  std::vector<Match> matches() const;
  // The occurrence before this one; of length 0 if there is none.
  Match before(Match match) const;

 private:
  std::size_t num_lengths() const { return max_ngram_ - min_ngram_ + 1; }

  // Calls visit(match) for the latest occurrence in this text of each suffix of `tokens` that has one, shortest first.
  template <class Visit>
  void for_each_match(const std::vector<Token>& tokens, Visit visit) const;

  // Calls visit(length, hash) for the grams of `tokens` that end at `end`, shortest first, until it returns false. Stops
  // at a separator.
  template <class Visit>
  void for_each_gram(const std::vector<Token>& tokens, std::size_t end, Visit visit) const;

  // The slot in `latest_` of the gram of `length` tokens that end before `gram_end`, or the free one it would take.
  std::size_t find(const Token* gram_end, std::size_t length, std::uint64_t hash) const;
  void index_end(std::size_t end);
  void unindex_end(std::size_t end);

  std::size_t min_ngram_;
  std::size_t max_ngram_;
  std::size_t capacity_ = 0;             // tokens that there is room for: a power of two, or 0
  std::vector<Token> tokens_;            // [size]
  std::vector<std::uint32_t> previous_;  // [size, num_lengths]: row e belongs to the grams that end before token e
  std::vector<std::uint32_t> latest_;    // [num_lengths, 2 * capacity]: at least half empty
};

}  // namespace specdec::host
