// Where top-k, top-p and min-p cut a row, without sorting it.
#pragma once
#include "cpu/row.h"

namespace specdec::cpu {

// The smallest logit kept of a row with the largest `max`, whose group maxima are in scratch, and the tiles' masses if
// scratch.summed. Leaves the kept ids in scratch if they are few enough (`listed`), else perhaps the tiles' masses of what
// is kept (`summed`).
float find_cutoff(const RowView& row, const Sampling& sampling, float max, RowScratch& scratch);

}  // namespace specdec::cpu
