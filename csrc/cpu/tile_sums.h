// Sums over a row's tiles in the order of common/tile_sums.h.
#pragma once
#include <vector>

namespace specdec::cpu {

float sum_of(const std::vector<float>& shares);

// The tile where a draw with `uniform` ends, its mass, and the rest of the goal there: infinite on an overrun.
struct FoundTile {
  int tile;
  double rest;
  float mass;
};
FoundTile find_tile(const std::vector<float>& mass, double uniform);

}  // namespace specdec::cpu
