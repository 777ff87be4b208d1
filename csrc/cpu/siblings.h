// P and Q at a node of a tree as its rejected children leave them: sums, and draws.
#pragma once
#include "common/siblings.h"
#include "cpu/draw.h"

namespace specdec::cpu {

struct NodeLaws : SiblingLaws<Reading, DraftLaw> {
  RejectionSums sums(float scale, float taken) const;
  // A token from the current P.
  int32_t draw(double uniform) const;

 private:
  // scale P and Q over one tile, both 0 at the children that were removed, and taken lift Q.
  void fill(int tile, float scale, float taken, float* scaled_p, float* q, float* taken_q) const;
};

}  // namespace specdec::cpu
