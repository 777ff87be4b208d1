// The rows of one sequence of a verify step: its target laws, its draft laws, its uniforms, and the flags of what was read.
#pragma once
#include "cpu/draw.h"

namespace specdec::cpu {

class SequenceRows {
 public:
  // `split`: the sequence may use all threads for one row.
  SequenceRows(const VerifyArgs& args, int64_t b, bool split) : args_(args), b_(b), split_(split) {}

 protected:
  bool has_draft() const { return args_.draft.data != nullptr || args_.draft_probs.data != nullptr; }
  RowView target_row(int64_t i) const { return row_view(args_.target, batch_, first_target_ + i); }
  void find_sampling(bool greedy_target);

  // Reads target row i; its flags count from here on.
  RowLaw read_target(int64_t i, RowScratch& scratch);
  // The draft's law at position i, from the stats kept from drafting if there are any, or all mass on `point` without a
  // draft; its flags count if `flag`.
  DraftRow draft_row(int64_t i, int32_t point, bool flag = true);
  // Uniform number i of the sequence; calls without any are greedy.
  float uniform(int64_t i);

  const VerifyArgs& args_;
  const int64_t b_;
  const bool split_;
  int64_t batch_ = 0, first_draft_ = 0, first_target_ = 0;  // indices of its first rows in `Rows`
  int64_t draft_index_ = 0, target_index_ = 0;              // the same in the flat arrays
  int32_t status_ = 0;
  Sampling target_sampling_{}, draft_sampling_{};

 private:
  RowLaw draft_law(const RowView& view, int64_t i) const;
};

}  // namespace specdec::cpu
