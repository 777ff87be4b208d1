#include "cpu/verify_rows.h"

#include <cmath>

#include "common/status.h"

namespace specdec::cpu {

void SequenceRows::find_sampling(bool greedy_target) {
  target_sampling_ = sampling_of(args_.params, b_);
  if (greedy_target) target_sampling_ = made_greedy(target_sampling_);
  draft_sampling_ = sampling_of(args_.draft_params, b_);
}

RowLaw SequenceRows::read_target(int64_t i, RowScratch& scratch) {
  const RowLaw law = analyse_row(target_row(i), target_sampling_, split_, scratch);
  status_ |= law.status;
  return law;
}

DraftRow SequenceRows::draft_row(int64_t i, int32_t point, bool flag) {
  if (!has_draft()) return DraftRow(point);
  if (args_.draft_probs.data) {
    const DraftRow row({row_view(args_.draft_probs, batch_, first_draft_ + i), args_.target_to_draft, args_.map_size});
    if (flag && row.has_nan()) status_ |= kNaN;
    return row;
  }
  const RowView view = row_view(args_.draft, batch_, first_draft_ + i);
  const RowLaw law = draft_law(view, i);
  if (flag) status_ |= law.status;
  return DraftRow({view, args_.target_to_draft, args_.map_size}, law);
}

RowLaw SequenceRows::draft_law(const RowView& view, int64_t i) const {
  thread_local RowScratch scratch;
  if (!args_.draft_values) return analyse_row(view, draft_sampling_, split_, scratch);
  const int64_t index = draft_index_ + i;
  const float* values = args_.draft_values + index * kNumValues;
  RowLaw law{};
  law.max = values[0];
  law.cutoff = values[1];
  law.normalizer = values[3];
  law.inverse_normalizer = 1.0f / values[3];
  law.inverse_temperature = draft_sampling_.inverse_temperature;
  const int64_t argmax = args_.draft_argmax[index];  // the caller's: it may be no id of the row
  law.argmax = argmax >= 0 && argmax < view.vocab ? int32_t(argmax) : -1;
  law.status = args_.draft_status[index];
  law.one_hot = draft_sampling_.greedy || std::isinf(law.max);
  return law;
}

float SequenceRows::uniform(int64_t i) {
  const float u = args_.uniform_samples ? args_.uniform_samples[target_index_ + i] : 0.0f;
  if (is_uniform(u)) return u;
  status_ |= kBadParam;
  return 0.0f;
}

}  // namespace specdec::cpu
