// P and Q at one node of a tree while its children are tried, and rejected one after the other.
#pragma once
#include "common/law.h"

namespace specdec {

// `Row`: a row that was read, with its `row` and its `law`, of which prob_at gives P; `Draft`: prob(id) gives Q.
template <class Row, class Draft>
struct SiblingLaws : Row {
  Draft draft;
  Siblings left;
  bool changed;      // P is no longer the row's own
  int32_t* removed;  // the children that were rejected
  int num_removed;

  SPECDEC_MEMBER bool is_removed(int32_t id) const {
    for (int i = 0; i < num_removed; ++i)
      if (removed[i] == id) return true;
    return false;
  }

  // P and Q as they are now.
  SPECDEC_MEMBER float p(int32_t id) const {
    if (is_removed(id)) return 0.0f;
    return residual_weight(left.a * prob_at(this->row, this->law, id), left.b * draft.prob(id));
  }
  SPECDEC_MEMBER float q(int32_t id) const { return is_removed(id) ? 0.0f : draft.prob(id) * left.inverse_mass; }

  // Whether P is the row's own and all on its argmax, so that a draw needs no uniform.
  SPECDEC_MEMBER bool certain() const { return this->law.one_hot && !changed; }
};

// Sums over ids when a child is rejected.
struct RejectionSums {
  float residual, mass;  // of (scale P - taken Q)+ and of Q, but for the children that were removed
};

}  // namespace specdec
