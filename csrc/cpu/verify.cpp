// verify_chain and verify_packed: one sequence at a time, rows read only as far as the rule gets.
#include <algorithm>
#include <cmath>
#include <utility>

#include "common/ids.h"
#include "common/status.h"
#include "cpu/draw.h"
#include "cpu/ops.h"
#include "cpu/parallel.h"
#include "cpu/verify_position.h"
#include "cpu/verify_rows.h"

namespace specdec::cpu {
namespace {

class Sequence : SequenceRows {
 public:
  Sequence(const VerifyChainArgs& args, int64_t b, bool split) : SequenceRows(args, b, split), chain_(args) {}

  void run() {
    find_block();
    int64_t* tokens = args_.tokens + b_ * (chain_.num_draft + 1);
    std::fill(tokens, tokens + chain_.num_draft + 1, -1);
    int64_t emitted = 0;
    if (!idle_) {
      find_sampling(chain_.acceptance == Acceptance::kGreedy);
      const bool by_block = chain_.acceptance == Acceptance::kBlock && has_draft() &&
                            (args_.draft_probs.data != nullptr || !draft_sampling_.greedy);
      int64_t final = -1;
      if (chain_.acceptance == Acceptance::kMatch || chain_.acceptance == Acceptance::kGreedy) {
        final = match_rule();
      } else {
        final = by_block ? block_rule() : token_rule();
      }
      for (int64_t i = 0; i < accepted_; ++i) tokens[i] = token(i);
      if (final >= 0) tokens[accepted_] = final;
      emitted = accepted_ + (final >= 0);
    }
    args_.num_accepted[b_] = int32_t(accepted_);
    args_.num_tokens[b_] = int32_t(emitted);
    args_.status[b_] = status_;
    if (chain_.overlap) write_overlap();
  }

 private:
  // Where the sequence's rows stand, and where its block ends: before the first placeholder or invalid id, and after the
  // first EOS, cut there before any rule looks at it.
  void find_block() {
    int64_t room = chain_.num_draft;
    if (chain_.cu) {
      const int64_t start = chain_.cu[b_], stop = chain_.cu[b_ + 1];
      if (start < 0 || stop < start || stop > chain_.total) {
        idle_ = true;
        status_ = kBadParam;
        return;
      }
      batch_ = 0;
      first_target_ = start + b_;
      if (stop - start > room) status_ |= kBadParam;
      room = std::min(room, stop - start);
      token_index_ = start;
      target_index_ = first_target_;
    } else {
      batch_ = b_;
      token_index_ = b_ * chain_.num_draft;
      target_index_ = b_ * (chain_.num_draft + 1);
    }
    const bool as_target = args_.law.cascade_bonus;
    first_draft_ = as_target ? first_target_ : chain_.cu ? token_index_ : 0;
    draft_index_ = as_target ? target_index_ : token_index_;
    int64_t given = room;
    if (chain_.num_draft_tokens.data) given = id_at(chain_.num_draft_tokens, b_);
    if (given > room || given < -1) status_ |= kBadParam;
    idle_ = given < 0;
    if (idle_) return;
    const int64_t limit = std::min(given, room);
    for (; length_ < limit; ++length_) {
      const int64_t id = token(length_);
      if (id < 0 || id >= args_.target.vocab) {
        if (id != -1) status_ |= kBadToken;
        return;
      }
      if (std::find(args_.eos_token_ids, args_.eos_token_ids + args_.num_eos, id) !=
          args_.eos_token_ids + args_.num_eos) {
        ++length_;
        ends_in_eos_ = true;
        return;
      }
    }
  }

  int64_t token(int64_t i) const { return id_at(chain_.draft_tokens, token_index_ + i); }
  void read(int64_t i, Position& position) {
    position.row = target_row(i);
    position.p = read_target(i, position.scratch);
  }
  void mix(int64_t i, Position& position) { position.mix(args_.law, draft_row(i, point(i)), split_); }
  int32_t point(int64_t i) const { return has_draft() ? -1 : int32_t(token(i)); }

  int64_t recovered(Position& position, float weight) {
    if (position.p.one_hot && !is_cascade(args_.law.kind)) return position.p.argmax;
    return position.recover(weight, uniform(0));
  }

  int64_t bonus(Position& position) {
    if (ends_in_eos_) return -1;
    read(length_, position);
    if (args_.law.cascade_bonus) {
      mix(length_, position);
      return position.draw(uniform(0));
    }
    if (position.p.one_hot) return position.p.argmax;
    return draw_token(position.row, position.p, position.scratch, nullptr, 1.0f, uniform(0), split_);
  }

  int64_t token_rule() {
    thread_local Position position;
    for (; accepted_ < length_; ++accepted_) {
      read(accepted_, position);
      const int32_t x = int32_t(token(accepted_));
      if (position.p.one_hot && !is_cascade(args_.law.kind)) {
        if (x != position.p.argmax) return position.p.argmax;
        continue;
      }
      mix(accepted_, position);
      if (!position.accepts(x) && !position.accepts(x, uniform(accepted_ + 1))) return recovered(position, 1.0f);
    }
    return bonus(position);
  }

  // The last i with u_i < h_i counts, so the walk goes on after a failure; it ends where w has become 0.
  int64_t block_rule() {
    thread_local Position best, current;
    float w = 1, best_w = 1, coin = 0;
    for (int64_t i = 0; i < length_ && w > 0; ++i) {
      read(i, current);
      mix(i, current);
      const bool success = i == 0 || coin < block_threshold(w, current.residual_mass(w));
      const float w_here = w;
      w = current.next_weight(w, int32_t(token(i)));
      coin = uniform(i + 1);
      if (!success) continue;
      accepted_ = i;
      best_w = w_here;
      std::swap(best, current);
    }
    if (coin < w) accepted_ = length_;
    return accepted_ == length_ ? bonus(best) : recovered(best, best_w);
  }

  int64_t match_rule() {
    thread_local RowScratch scratch;
    for (;; ++accepted_) {
      if (ends_in_eos_ && accepted_ == length_) return -1;
      const RowLaw law = read_target(accepted_, scratch);
      int64_t wanted = law.argmax;
      if (args_.noise_keys && !law.one_hot)
        wanted =
            noisy_top(target_row(accepted_), law, scratch, args_.noise_keys[target_index_ + accepted_], nullptr, 1)[0]
                .id;
      if (accepted_ == length_ || token(accepted_) != wanted) return wanted;
    }
  }

  void write_overlap() {
    thread_local RowScratch scratch;
    float* out = chain_.overlap + b_ * chain_.num_draft;
    for (int64_t i = 0; i < chain_.num_draft; ++i) {
      out[i] = -1.0f;
      if (i >= length_) continue;
      const RowLaw law = analyse_row(target_row(i), target_sampling_, split_, scratch);
      out[i] = overlap(target_row(i), law, draft_row(i, point(i), false), split_);
    }
  }

  const VerifyChainArgs& chain_;
  bool idle_ = false, ends_in_eos_ = false;
  int64_t token_index_ = 0;  // of its first draft token
  int64_t length_ = 0, accepted_ = 0;
};

}  // namespace

void verify(const VerifyChainArgs& args) {
  for_each_row(args.batch, [&](int64_t b, bool split) { Sequence(args, b, split).run(); });
}

}  // namespace specdec::cpu
