// Sums over a row's tiles, and how a draw finds its tile by them: the one order, whoever adds (but Triton's kernels, whose
// order is their own).
//
// Up to kTree neighbouring tiles (all of a vocabulary of 262144) are added as a balanced binary tree, neighbours first; the
// trees' sums, where a row has several, in index order. Tiles that the last tree lacks count as 0, which changes no bit. A
// warp's lane has kLeaves of the tiles and its 32 lanes add the rest in five steps; an error is that of 8 roundings.
//
// A draw adds them in float64 and goes down these sums, from a tree's to a tile's, with what is left of its goal: to the left
// of two neighbours where the left has more, else to the right with so much less. So it only ever meets sums that were
// added, a larger uniform never leads further left, and it never ends at a tile without mass. On an overrun, with an infinite
// goal, it ends at the last tile of positive mass.
//
// How fine a draw is: tiles' masses are float32, each wrong by a few 2^-24 of itself; their sums and what is left of the
// goal are float64, wrong by some 2^-53 of the total. In its tile a draw goes along the float64 sums of the ids' weights,
// whose total is not quite the tile's mass: what is left is scaled by the two (goal_inside), so that no id falls off the
// tile's end or is drawn for what is missing. So an id's chance is wrong by a few 1e-7 of itself, whatever the ids beside it
// weigh, until it comes down to 2^-53 of the total and the uniform's own steps.
#pragma once
#include <math.h>

#include <cstdint>

#include "common/host_device.h"

namespace specdec {

constexpr int kLeaves = 8, kTree = 32 * kLeaves;

// Which of two neighbours a draw goes on to; `left` and `right`: their sums, not both 0.
SPECDEC_HD bool goes_right(double rest, double left, double right) { return !(rest < left) && right > 0; }

// What is left of the goal there.
SPECDEC_HD double rest_after(bool right, double rest, double left) { return right ? rest - left : rest; }

// The goal of a draw inside a tile: what is left of it there, of the tile's mass, as much of the weights' total.
SPECDEC_HD double goal_inside(double rest, float mass, double total) { return rest * (total / mass); }

// Where a draw goes on among trees that are met in index order.
struct TreeSearch {
  double goal, before = 0.0;  // the sum of the trees that were passed by
  double rest = INFINITY;     // of the goal, in the tree that was chosen
  int32_t first = -1;         // the first tile of that, or of the last with any mass; -1 as long as there was none

  // Whether the draw ends in the tree of these tiles.
  SPECDEC_MEMBER bool ends_in(int32_t first_tile, double sum) {
    if (!(sum > 0)) return false;
    first = first_tile;
    if (before + sum > goal) {
      rest = goal - before;
      return true;
    }
    before += sum;
    return false;
  }
};

}  // namespace specdec
