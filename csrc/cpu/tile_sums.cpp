#include "cpu/tile_sums.h"

#include <algorithm>

#include "common/tile_sums.h"

namespace specdec::cpu {
namespace {

// The sums of one tree, of type T: node 1 is the sum of all, node k that of nodes 2 k and 2 k + 1, and tile i is node
// leaves_ + i.
template <class T>
class Tree {
 public:
  Tree(const float* shares, int n) {
    while (leaves_ < n) leaves_ *= 2;
    std::fill(std::copy(shares, shares + n, node_ + leaves_), node_ + 2 * leaves_, T(0));
    for (int width = leaves_ / 2; width > 0; width /= 2)
      for (int k = width; k < 2 * width; ++k) node_[k] = node_[2 * k] + node_[2 * k + 1];
  }

  T sum() const { return node_[1]; }

  FoundTile find(double rest) const {
    int k = 1;
    while (k < leaves_) {
      const T left = node_[2 * k];
      const bool right = goes_right(rest, left, node_[2 * k + 1]);
      rest = rest_after(right, rest, left);
      k = 2 * k + right;
    }
    return {k - leaves_, rest, float(node_[k])};
  }

 private:
  int leaves_ = 1;
  T node_[2 * kTree];
};

template <class T>
Tree<T> tree_from(const std::vector<float>& shares, size_t first) {
  return Tree<T>(&shares[first], int(std::min<size_t>(kTree, shares.size() - first)));
}

template <class T>
T sum_in_trees(const std::vector<float>& shares) {
  T sum = 0;
  for (size_t first = 0; first < shares.size(); first += kTree) sum += tree_from<T>(shares, first).sum();
  return sum;
}

}  // namespace

float sum_of(const std::vector<float>& shares) { return sum_in_trees<float>(shares); }

FoundTile find_tile(const std::vector<float>& mass, double uniform) {
  TreeSearch search{uniform * sum_in_trees<double>(mass)};
  for (size_t first = 0; first < mass.size(); first += kTree)
    if (search.ends_in(int32_t(first), tree_from<double>(mass, first).sum())) break;
  const int first = std::max(search.first, 0);
  const FoundTile inside = tree_from<double>(mass, size_t(first)).find(search.rest);
  return {first + inside.tile, inside.rest, inside.mass};
}

}  // namespace specdec::cpu
