// Where top-k, top-p and min-p cut a row, without sorting it.
#pragma once
#include "cpu/row.h"

namespace specdec::cpu {

// The smallest logit kept in a row whose largest is `max`; scratch has the group maxima and, if scratch.summed, the
// tiles' masses. Leaves the kept ids in scratch if they are few enough (`listed`), else perhaps the tiles' masses of
// what is kept (`summed`).
float find_cutoff(const RowView& row, const Sampling& sampling, float max, RowScratch& scratch);

}  // namespace specdec::cpu
