// Sums over a row's tiles, and the tile in which a draw ends, by one warp in the order of common/tile_sums.h.
#pragma once
#include "common/tile_sums.h"
#include "cuda/warp.cuh"

namespace specdec::cuda {

// The tile in which a draw ends, its mass, and the rest of the goal there: infinite on an overrun. -1 if nothing has
// mass.
struct FoundTile {
  int tile;
  double rest;
  float mass;
};

// One tree: a lane's tiles and the sums on the way to the root, in numbers of type T.
template <class T>
class WarpTree {
 public:
  // From tiles first … n - 1, at most kTree of them; share(tile) gives what is added.
  template <class Share>
  __device__ __forceinline__ WarpTree(int first, int n, Share share) {
    first += lane_id() * kLeaves;
#pragma unroll
    for (int i = 0; i < kLeaves; ++i) leaf_[i] = first + i < n ? share(first + i) : 0.0f;
    sum_ = four(0) + four(1);
#pragma unroll
    for (int level = 0; level < kLevels; ++level) {
      mine_[level] = sum_;
      other_[level] = __shfl_xor_sync(kAllLanes, sum_, 1 << level);
      sum_ += other_[level];
    }
  }

  __device__ T sum() const { return sum_; }  // the sum of all, in every lane

  // Where a draw with `rest` left of its goal ends; the tile is counted from the tree's first. The same in every lane.
  // The sum must be positive.
  __device__ __forceinline__ FoundTile find(double rest) const {
    bool here = true;  // the draw ends in this lane
#pragma unroll
    for (int level = kLevels - 1; level >= 0; --level) {
      const bool is_right = lane_id() >> level & 1;
      const T left = is_right ? other_[level] : mine_[level];
      const bool right = goes_right(rest, left, is_right ? mine_[level] : other_[level]);
      here = here && right == is_right;
      rest = rest_after(right, rest, left);
    }
    const bool far = goes_right(rest, four(0), four(1));
    rest = rest_after(far, rest, four(0));
    const T near_pair = far ? pair(2) : pair(0);
    const bool second = goes_right(rest, near_pair, far ? pair(3) : pair(1));
    rest = rest_after(second, rest, near_pair);
    const float even = second ? (far ? leaf_[6] : leaf_[2]) : (far ? leaf_[4] : leaf_[0]);
    const float odd = second ? (far ? leaf_[7] : leaf_[3]) : (far ? leaf_[5] : leaf_[1]);
    const bool last = goes_right(rest, even, odd);
    rest = rest_after(last, rest, even);
    const int lane = __ffs(int(__ballot_sync(kAllLanes, here))) - 1;
    return {lane * kLeaves + __shfl_sync(kAllLanes, 4 * far + 2 * second + last, lane),
            __shfl_sync(kAllLanes, rest, lane), __shfl_sync(kAllLanes, last ? odd : even, lane)};
  }

 private:
  static constexpr int kLevels = 5;
  static_assert(kTree == kLeaves << kLevels);
  __device__ __forceinline__ T pair(int i) const { return T(leaf_[2 * i]) + leaf_[2 * i + 1]; }
  __device__ __forceinline__ T four(int i) const { return pair(2 * i) + pair(2 * i + 1); }

  float leaf_[kLeaves];               // the lane's tiles
  T mine_[kLevels], other_[kLevels];  // per level of lanes: the sums of two neighbours
  T sum_;
};

// The sum over a row's n tiles of share(tile), in every lane of the calling warp.
template <class Share>
__device__ __forceinline__ float sum_of_tiles(int n, Share share) {
  float sum = 0.0f;
  for (int first = 0; first < n; first += kTree) sum += WarpTree<float>(first, n, share).sum();
  return sum;
}

// Out of line: it has many call sites.
inline __device__ __noinline__ float sum_of_tiles(const float* shares, int n) {
  return sum_of_tiles(n, [shares](int tile) { return shares[tile]; });
}

__device__ __forceinline__ FoundTile find_tile(const float* mass, int n, double uniform) {
  const auto share = [mass](int tile) { return mass[tile]; };
  WarpTree<double> tree(0, n, share);  // if that is all, the loads are done
  double total = tree.sum();
  for (int first = kTree; first < n; first += kTree) total += WarpTree<double>(first, n, share).sum();
  TreeSearch search{uniform * total};
  bool found = search.ends_in(0, tree.sum());
  for (int first = kTree; first < n && !found; first += kTree)
    found = search.ends_in(first, WarpTree<double>(first, n, share).sum());
  if (search.first < 0) return {-1, 0.0, 0.0f};
  if (search.first > 0) tree = WarpTree<double>(search.first, n, share);
  FoundTile inside = tree.find(search.rest);
  inside.tile += search.first;
  return inside;
}

}  // namespace specdec::cuda
