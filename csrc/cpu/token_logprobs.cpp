#include "common/token_logprobs.h"

#include <algorithm>
#include <cmath>

#include "cpu/ops.h"
#include "cpu/parallel.h"
#include "cpu/row.h"

namespace specdec::cpu {
namespace {

// The first ids by descending logit in the part of a row seen so far; a row is read from the lowest id on.
class Top {
 public:
  explicit Top(int most) : most_(most) {}
  // Whether an id with that logit would be among them.
  bool takes(float x) const { return count_ < most_ || (most_ > 0 && x > logit_[count_ - 1]); }
  void add(float x, int32_t id) {
    int place = count_ < most_ ? count_++ : count_ - 1;
    for (; place > 0 && x > logit_[place - 1]; --place) {
      logit_[place] = logit_[place - 1];
      id_[place] = id_[place - 1];
    }
    logit_[place] = x;
    id_[place] = id;
  }
  int count() const { return count_; }
  float logit(int place) const { return logit_[place]; }
  int32_t id(int place) const { return id_[place]; }

 private:
  const int most_;
  int count_ = 0;
  float logit_[kMostTop];
  int32_t id_[kMostTop];
};

// `read` is the row as given, `processed` the row after processors.
void look_at(const TokenLogprobsArgs& args, int64_t index, const TokenSlot& slot, const Reading& read,
             const RowView& processed, const LogLaws& laws) {
  const RowView& row = read.row;
  const auto both = [&](float raw, int32_t id) {
    Logit x{raw, raw};
    if (processed.processed) processed.kernels().load(processed.at(id, 1), 1, &x.processed);
    return x;
  };
  float x;
  row.kernels().load(row.at(slot.token, 1), 1, &x);
  Top top(args.num_top);
  int32_t rank = 1;
  const std::vector<float>& group_max = read.scratch.group_max;
  for (int group = 0; group < int(group_max.size()); ++group) {  // most groups need not be read again
    if (group_max[group] < x && !top.takes(group_max[group])) continue;
    const int first = group * kGroup, n = std::min(kGroup, row.vocab - first);
    float values[kGroup];
    row.kernels().load(row.at(first, n), n, values);
    for (int i = 0; i < n; ++i) {
      rank += values[i] > x || (values[i] == x && first + i < slot.token);
      if (top.takes(values[i])) top.add(values[i], first + i);
    }
  }
  write_token(args, index, laws, both(x, slot.token), slot.token, rank);
  for (int place = 0; place < top.count(); ++place)
    write_top(args, index, place, laws, both(top.logit(place), top.id(place)), top.id(place));
  write_no_top(args, index, top.count());
}

}  // namespace

void token_logprobs(const TokenLogprobsArgs& args) {
  for_each_row(args.batch * args.width, args.logits.vocab, [&](int64_t index, Team* team) {
    const TokenSlot slot = token_slot(args, index);
    if (slot.token < 0) return write_no_token(args, index, slot.status);
    thread_local Reading read, made;  // as given; after processors, if there are any
    const RowView row = row_view(args.logits, slot.b, slot.row);
    Sampling sampling = sampling_of(args.params, slot.b);
    if (args.processors.on) {
      const int64_t first = slot.b * args.n + slot.row - slot.place;
      read_row(
          row_view(args.logits, slot.b, slot.row, args.processors, slot.b, first, slot.place, tokens_of(args, slot.b)),
          sampling, team, made);
      sampling.greedy = true;  // of the row as given only the maximum is needed
    }
    read_row(row, sampling, team, read);
    const Reading& processed = args.processors.on ? made : read;
    const RowLaw& law = processed.law;
    LogLaws laws{law, std::log(law.normalizer), read.law.max, 0.0f, read.law.argmax};
    laws.law.status |= read.law.status;
    float entropy;
    raw_moments(row, read.law.max, team, &laws.raw_log_normalizer, &entropy);
    look_at(args, index, slot, read, processed.row, laws);
  });
}

}  // namespace specdec::cpu
