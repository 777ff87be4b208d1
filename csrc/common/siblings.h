// P and Q at one node of a tree while its children, which were drawn without replacement, are tried and rejected one after
// the other.
#pragma once
#include "common/law.h"

namespace specdec {

// P and Q at a node some of whose children were rejected: (a P - b lift Q)+ and lift Q / mass, except at the children
// themselves, whose P is known and whose Q is 0. Repeated updates "P becomes norm((w P - Q)+)" never need more, as the
// outer (.)+ contains the inner one.
struct Siblings {
  float a = 1.0f, b = 0.0f, inverse_mass = 1.0f;
  float lift = 1.0f;  // a power of two, which rounds nothing: the inverse of Q's remaining mass might not fit a float
  int32_t only = -1;  // a child rejected by rounding although it had all that was left of P: all of P is on it
};

// The factor by which to lift Q when `mass` is left of it.
SPECDEC_HD float lift_of(float mass) { return mass < 0x1p-60f ? 0x1p100f : 1.0f; }

// (w P - Q)+ of the remaining P and Q is (scale P - taken lift Q)+ of the original ones.
SPECDEC_HD float rejected_scale(const Siblings& left, float w) { return w * left.a; }
SPECDEC_HD float rejected_taken(const Siblings& left, float w) { return w * left.b + left.inverse_mass; }

// Sums over ids when a child is rejected, both without the removed children.
struct RejectionSums {
  float residual, mass;  // of (scale P - taken lift Q)+ and of Q
};

// What is left after rejecting child x, whose probability in P was p. `changed`: P is no longer the row's own.
SPECDEC_HD Siblings after_rejection(const Siblings& left, float w, int32_t x, float p, bool changed,
                                    const RejectionSums& sums) {
  Siblings out = left;
  out.lift = lift_of(sums.mass);
  const float change = left.lift / out.lift;
  out.b *= change;
  if (sums.residual > 0) {
    out.a = rejected_scale(left, w) / sums.residual;
    out.b = rejected_taken(left, w) * change / sums.residual;
  } else if (changed && left.only < 0 && p > 0) {
    out.only = x;
  }
  out.inverse_mass = sums.mass > 0 ? 1.0f / (sums.mass * out.lift) : 0.0f;
  return out;
}

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
    return residual_weight(left.a * prob_at(this->row, this->law, id), left.b * (left.lift * draft.prob(id)));
  }
  SPECDEC_MEMBER float q(int32_t id) const {
    return is_removed(id) ? 0.0f : left.lift * draft.prob(id) * left.inverse_mass;
  }

  // The id known to have all of P's mass, so that a draw needs no uniform: its row's, or see Siblings. -1: none.
  SPECDEC_MEMBER int32_t certain_id() const {
    return this->law.one_hot && !changed ? int32_t(this->law.argmax) : left.only;
  }
};

}  // namespace specdec
