// P and Q at one node of a tree while its children are tried and rejected one after the other.
#pragma once
#include <utility>
#include <vector>

#include "cpu/draw.h"

namespace specdec::cpu {

class SiblingLaws {
 public:
  // The node's target row, its law P and what reading it left: to be set, then begin(Q).
  Reading target;

  void begin(const DraftLaw& q);

  float prob(int32_t id) const;        // P as it is now
  float draft_prob(int32_t id) const;  // Q as it is now
  // P becomes norm((w P - Q)+), unless that is empty, and child `id` leaves Q; returns the sum of (w P - Q)+. A child is
  // rejected only where w P < Q, so that it leaves P too.
  float reject(int32_t id, float w);
  // Whether P is the row's own and all on its argmax, so that a draw needs no uniform.
  bool certain() const { return target.law.one_hot && !changed_; }
  // A token from P as it is now.
  int32_t draw(float uniform) const;

 private:
  bool removed(int32_t id) const;
  // scale P and taken Q over one tile, both 0 at the children that were removed.
  void fill(int tile, float scale, float taken, float* scaled_p, float* q, float* taken_q) const;

  DraftLaw draft_{-1};
  bool changed_ = false;
  Siblings left_{};
  std::vector<int32_t> removed_;
};

}  // namespace specdec::cpu
