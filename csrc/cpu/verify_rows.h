// The rows of one sequence of a verify step: its target laws, its draft laws, its uniforms, and the flags of what was read.
#pragma once
#include "common/span.h"
#include "cpu/draw.h"

namespace specdec::cpu {

class SequenceRows {
 public:
  SequenceRows(const VerifyArgs& args, int64_t b, const Span& span, const Sampling& target_sampling, Team* team);

 protected:
  // Target row i, as processors make it.
  RowView target_row(int64_t i) const;
  // Reads target row i; its flags count from here on.
  void read_target_row(int64_t i, Reading& out);
  // The draft's law at position i: from the stats kept from drafting if there are any; without a draft, all mass on
  // `point`. Its flags count if `flag`.
  DraftLaw draft_law(int64_t i, int32_t point, bool flag = true);
  double uniform(int64_t i) { return uniform_at(args_, span_, b_, i, &status_); }

  const VerifyArgs& args_;
  const int64_t b_;
  Span span_;
  const Sampling target_sampling_, draft_sampling_;
  Team* const team_;
  int32_t status_;
  Drafted drafted_{};   // of the sequence
  int64_t mask_index_;  // the number of its first target row among all
};

}  // namespace specdec::cpu
