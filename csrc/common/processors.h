// Logits processors, which change a row of the target's logits before sampling parameters act on it: their order and
// the formula for one id, for every kernel; specdec_kernels/processors.py describes them.
#pragma once
#include <math.h>

#include "common/ids.h"
#include "common/status.h"

namespace specdec {

// The draft tokens before a row: in a chain the `length` ones from `first` on; in a tree those of `node` and its
// ancestors except the root.
struct Drafted {
  Ids tokens{};
  int64_t first = 0, length = 0;
  const int64_t* parents = nullptr;  // of the tree's nodes
  int32_t node = 0;

  template <class Fn>
  SPECDEC_MEMBER void for_each(Fn f) const {
    for (int64_t i = 0; i < length; ++i) f(id_at(tokens, first + i));
    for (int64_t at = node; at > 0;) {
      f(id_at(tokens, first + at));
      const int64_t above = parents[at];
      at = above < at ? above : 0;  // terminates for any input
    }
  }
  SPECDEC_MEMBER int32_t count() const {
    int32_t n = 0;
    for_each([&](int64_t token) { n += token >= 0; });
    return n;
  }
  SPECDEC_MEMBER int32_t count(int64_t token) const {
    int32_t n = 0;
    for_each([&](int64_t one) { n += one == token; });
    return n;
  }
  // The draft tokens before row i of a sequence.
  SPECDEC_MEMBER Drafted before(int64_t i) const {
    Drafted out = *this;
    if (parents)
      out.node = int32_t(i);
    else
      out.length = i;
    return out;
  }
};

// What processors do to the rows of one sequence. A null pointer: that part is off.
struct Overlay {
  const int32_t *bitmask = nullptr, *allowed = nullptr;  // bit v % 32 of word v / 32: whether v may be drawn
  int64_t words = 0;                                     // from a row's bitmask to the next one's
  const int32_t* bias_ids = nullptr;
  const float* bias_values = nullptr;
  const int32_t* bias_until = nullptr;  // barred while the output, drafted tokens included, is shorter
  int32_t num_bias = 0;
  const int32_t *count_ids = nullptr,
                *counts = nullptr;  // twice an id's count in the output, + 1 if the prompt has it
  int32_t num_counts = 0;
  bool penalises = false;  // by repetition and the like; lists of counts may be empty
  float repetition = 1.0f, frequency = 0.0f, presence = 0.0f;
  int64_t num_output = 0;  // without drafted tokens
  Drafted drafted{};       // of the sequence
  int32_t status = 0;

  // The penalised logit of an id with this entry in `counts`, drafted so many times. A negative entry, which can only
  // have been written by hand, counts as 0.
  SPECDEC_MEMBER float penalised(float x, int32_t count, int32_t drafted_times) const {
    const int32_t known = count > 0 ? count : 0, times = known / 2 + drafted_times;
    if (known > 0 || times > 0) x = x > 0 ? x / repetition : x * repetition;
    return times > 0 ? x - frequency * float(times) - presence : x;
  }
};

// The overlay of one of its rows; none if `of` is null.
struct OverlaidRow {
  const Overlay* of = nullptr;
  int32_t row = 0;

  SPECDEC_MEMBER explicit operator bool() const { return of != nullptr; }
  SPECDEC_MEMBER int32_t status() const { return of ? of->status : 0; }
  SPECDEC_MEMBER const int32_t* bitmask() const { return of->bitmask ? of->bitmask + row * of->words : nullptr; }
  SPECDEC_MEMBER Drafted drafted() const { return of->drafted.before(row); }

  SPECDEC_MEMBER bool masked(int32_t id) const {
    const auto bit = [id](const int32_t* words) { return (uint32_t(words[id / 32]) >> (id % 32)) & 1; };
    const int32_t* const words = bitmask();
    return (words && !bit(words)) || (of->allowed && !bit(of->allowed));
  }
  // The logit x after entry `i` of the bias list, whose value is `added`.
  SPECDEC_MEMBER float biased(float x, int32_t i, float added) const {
    const bool barred = of->bias_until && of->num_output + drafted().count() < of->bias_until[i];
    return x + (barred ? -INFINITY : added);
  }
};

// The first of `n` ascending ids that is `least` or more.
SPECDEC_HD int32_t first_at_least(const int32_t* ids, int32_t n, int32_t least) {
  int32_t begin = 0;
  while (n > 0) {
    const int32_t half = n / 2;
    const bool right = ids[begin + half] < least;
    begin = right ? begin + half + 1 : begin;
    n = right ? n - half - 1 : half;
  }
  return begin;
}

// Calls f(entry, id - begin) for the entries of a list whose ids are among the `n` from `begin` on.
template <class Fn>
SPECDEC_RULE void for_each_listed(const int32_t* ids, int32_t num_ids, int32_t begin, int32_t n, Fn f) {
  for (int32_t i = first_at_least(ids, num_ids, begin); i < num_ids && ids[i] - begin < n; ++i) f(i, ids[i] - begin);
}

// Whether a list's entry may follow the one before it. An id that is out of order, or there twice, would not look the
// same to all who search for it.
SPECDEC_HD bool may_follow(int32_t id, int32_t before) { return id > before || id == INT32_MAX; }

// The logit of an id after processors, from the model's logit x.
SPECDEC_RULE float processed(const OverlaidRow& row, int32_t id, float x) {
  const Overlay& all = *row.of;
  if (row.masked(id)) x = -INFINITY;
  for_each_listed(all.bias_ids, all.num_bias, id, 1,
                  [&](int32_t i, int32_t) { x = row.biased(x, i, all.bias_values[i]); });
  if (!all.penalises) return x;
  int32_t known = 0;
  for_each_listed(all.count_ids, all.num_counts, id, 1, [&](int32_t i, int32_t) { known = all.counts[i]; });
  return all.penalised(x, known, row.drafted().count(id));
}

// The overlay of sequence b, whose first row is number `first` of all rows; ascends(ids, num_ids) tells whether a
// list's ids ascend.
template <class Ascends>
SPECDEC_RULE Overlay overlay_of(const ProcessorArgs& all, int64_t b, int64_t first, const Drafted& drafted,
                                Ascends ascends) {
  Overlay out{};
  out.words = all.words;
  out.bitmask = all.bitmask ? all.bitmask + first * all.words : nullptr;
  out.allowed = all.allowed.of(b);
  out.bias_ids = all.bias_ids.of(b);
  out.bias_values = all.bias_values.of(b);
  out.bias_until = all.bias_until.of(b);
  out.num_bias = int32_t(all.bias_ids.width);
  if (!ascends(out.bias_ids, out.num_bias)) {
    out.status |= kBadParam;
    out.num_bias = 0;
  }
  if (out.bias_until) out.num_output = *all.num_output.of(b);
  out.drafted = drafted;
  if (!all.penalties.data) return out;
  out.penalises = true;
  const float* penalties = all.penalties.of(b);
  const bool good_r = penalties[0] > 0 && penalties[0] < INFINITY, good_f = fabsf(penalties[1]) < INFINITY,
             good_p = fabsf(penalties[2]) < INFINITY;
  out.repetition = good_r ? penalties[0] : 1.0f;
  out.frequency = good_f ? penalties[1] : 0.0f;
  out.presence = good_p ? penalties[2] : 0.0f;
  out.count_ids = all.count_ids.of(b);
  out.counts = all.counts.of(b);
  out.num_counts = int32_t(all.count_ids.width);
  const bool good = ascends(out.count_ids, out.num_counts);
  if (!good) out.num_counts = 0;
  if (!good || !good_r || !good_f || !good_p) out.status |= kBadParam;
  return out;
}

}  // namespace specdec
