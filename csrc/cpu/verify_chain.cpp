// verify_chain and verify_packed: one sequence at a time; rows are read only as far as the rule gets.
#include "common/chain_rules.h"
#include "cpu/ops.h"
#include "cpu/parallel.h"
#include "cpu/verify_position.h"
#include "cpu/verify_rows.h"

namespace specdec::cpu {
namespace {

// Looks at one position after the other.
FoundEnd search(int64_t limit, auto end_at) {
  for (int64_t i = 0; i < limit; ++i)
    if (const End end = end_at(i); end != End::kNone) return {i, end};
  return {limit, End::kNone};
}

class Chain : SequenceRows {
 public:
  Chain(const VerifyChainArgs& args, int64_t b, Team* team)
      : SequenceRows(args, b, find_span(args, b, [](auto... of) { return search(of...); }), target_sampling(args, b),
                     team),
        chain_(args) {
    drafted_ = drafted_of(args, span_);
    mask_index_ = mask_index(args, span_, b);
  }

  void run() {
    if (chain_.overlap) write_overlap();
    const Outcome outcome = chain_rule(chain_, span_, b_, *this);
    write_outcome(chain_, span_, b_, outcome, status_, 0, 1);
  }

  // ---- Answers to common/chain_rules.h ----

  int64_t token(int64_t i) const { return token_at(chain_, span_, i); }
  double coin(int64_t i) { return uniform(i + 1); }

  void read_target(int64_t i) {
    if (now_ == remembered_) now_ = &positions()[now_ == &positions()[0]];
    read_target_row(i, now_->target);
    now_->begin();
  }
  void read_draft(int64_t i) { now_->mix(args_.law, draft_law(i, point_at(chain_, span_, i))); }
  void end_before(int64_t i) {
    specdec::end_before(span_, i);
    status_ |= kBadDraft;
  }

  bool one_hot() const { return now_->target.law.one_hot; }
  int64_t argmax() const { return now_->target.law.argmax; }
  float p(int32_t x) const { return now_->p(x); }
  float q(int32_t x) const { return now_->q(x); }
  bool keeps(int32_t x) const { return now_->keeps(x); }
  float accept() { return now_->accept(); }

  void enter(int64_t i, float w) {
    read_target(i);
    read_draft(i);
    now_->set_residual(w);
  }
  float residual(int64_t) const { return now_->mass(); }
  float next_weight(int64_t i, float w) const { return weight_after(args_.law, *now_, int32_t(token(i)), w); }
  void remember(int64_t, float) { remembered_ = now_; }

  int64_t wanted(int64_t i) {
    if (!has_noise(args_) || one_hot()) return argmax();
    return noisy_top(now_->target, key_at(args_, span_, b_, i), nullptr, 1)[0].id;
  }

  int64_t final_token(Next next, int64_t accepted) {
    if (next == Next::kNothing) return Outcome::kNothing;
    if (next == Next::kBonus) {
      read_target(accepted);
      if (args_.law.cascade_bonus) {
        read_draft(accepted);
        now_->set_cascade();
      }
    } else if (remembered_) {
      now_ = remembered_;
    } else if (!one_hot() || is_cascade(args_.law.kind)) {  // else Q was not read
      now_->set_residual(1.0f);
    }
    return now_->certain() ? argmax() : now_->draw(uniform(0));
  }

 private:
  static Position* positions() {
    thread_local Position positions[2];
    return positions;
  }

  void write_overlap() {
    thread_local Reading read;
    float* out = chain_.overlap + b_ * chain_.num_draft;
    for (int64_t i = 0; i < chain_.num_draft; ++i) {
      out[i] = -1.0f;
      if (i >= span_.length) continue;
      read_row(target_row(i), target_sampling_, team_, read);
      out[i] = overlap(read, draft_law(i, point_at(chain_, span_, i), false));
    }
  }

  const VerifyChainArgs& chain_;
  Position* now_ = positions();
  Position* remembered_ = nullptr;
};

}  // namespace

void verify_chain(const VerifyChainArgs& args) {
  for_each_row(args.batch, (args.num_draft + 1) * args.target.vocab,
               [&](int64_t b, Team* team) { Chain(args, b, team).run(); });
}

}  // namespace specdec::cpu
