// Sums over a row's tiles, and how a draw finds its tile from them. The order is the same whoever adds, except in
// Triton's kernels, which have their own. (The sums of what is kept of a cut row, and of a draft's probabilities, are
// each backend's own.)
//
// Up to kTree neighbouring tiles (all of a vocabulary of 262144) are added as a balanced binary tree, neighbours first;
// if a row has several trees, their sums are added in index order. Tiles that the last tree lacks count as 0, which
// changes no bit. Each lane of a warp adds kLeaves tiles, and its 32 lanes add the rest in five steps; the error is
// that of 8 roundings.
//
// A draw adds the tiles in float64 and descends these sums, from a tree's to a tile's, with the rest of its goal: it
// goes left if the left sum exceeds the rest, else right with the left sum subtracted. So it only ever meets sums that
// were added, a larger uniform never leads further left, and it never ends at a tile without mass. On an overrun, with
// an infinite goal, it ends at the last tile of positive mass.
//
// Precision of a draw: tile masses are float32, each with a relative error of a few 2^-24; their sums and the rest of
// the goal are float64, with an error of some 2^-53 of the total. Inside its tile a draw follows the float64 running
// sums of the ids' weights, whose total is not quite the tile's mass. The rest is therefore scaled by the ratio of the
// two (goal_inside), so that no id falls off the tile's end or is drawn for mass that is missing. So an id's
// probability has a relative error of a few 1e-7, whatever the ids beside it weigh, down to 2^-53 of the total and the
// uniform's own steps.
#pragma once
#include <math.h>

#include <cstdint>

#include "common/host_device.h"

namespace specdec {

constexpr int kLeaves = 8, kTree = 32 * kLeaves;

// Which of two neighbours a draw goes on to; `left` and `right`: their sums, not both 0.
SPECDEC_HD bool goes_right(double rest, double left, double right) { return !(rest < left) && right > 0; }

// The rest of the goal on that side.
SPECDEC_HD double rest_after(bool right, double rest, double left) { return right ? rest - left : rest; }

// The goal of a draw inside a tile: `rest`, a share of the tile's mass, as the same share of the weights' total.
SPECDEC_HD double goal_inside(double rest, float mass, double total) { return rest * (total / mass); }

// Finds the tree in which a draw ends; trees are visited in index order.
struct TreeSearch {
  double goal, before = 0.0;  // the sum of the trees passed so far
  double rest = INFINITY;     // the rest of the goal in the chosen tree
  int32_t first = -1;         // the first tile of the chosen tree, or of the last with any mass; -1: none yet

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
