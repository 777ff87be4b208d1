#include "cpu/verify_rows.h"

namespace specdec::cpu {

SequenceRows::SequenceRows(const VerifyArgs& args, int64_t b, const Span& span, const Sampling& target_sampling,
                           Team* team)
    : args_(args),
      b_(b),
      span_(span),
      target_sampling_(target_sampling),
      draft_sampling_(sampling_of(args.draft_params, b)),
      team_(team),
      status_(span.status),
      mask_index_(span.target_index) {}

RowView SequenceRows::target_row(int64_t i) const {
  return row_view(args_.target, span_.batch, span_.first_target + i, args_.processors, b_, mask_index_, i, drafted_);
}

void SequenceRows::read_target_row(int64_t i, Reading& out) {
  read_row(target_row(i), target_sampling_, team_, out);
  status_ |= out.law.status;
}

DraftLaw SequenceRows::draft_law(int64_t i, int32_t point, bool flag) {
  if (!has_draft(args_)) return DraftLaw(point);
  const MappedRow mapped{row_view(rows_of_draft(args_), span_.draft_batch, span_.first_draft + i),
                         args_.target_to_draft, args_.map_size};
  if (args_.draft_probs.data) {
    const int32_t status = status_of_probs(mapped.row, team_);
    if (flag) status_ |= status;
    return status & kBadDraft ? DraftLaw(mapped, no_law(0)) : DraftLaw(mapped);
  }
  thread_local Reading read;
  if (has_stats(args_))
    read.law = kept_draft_law(args_, span_, b_, i);
  else
    read_row(mapped.row, draft_sampling_, team_, read);
  if (flag) status_ |= read.law.status;
  return DraftLaw(mapped, read.law);
}

}  // namespace specdec::cpu
