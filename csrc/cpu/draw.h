// Draws from a row's law, or from what is left of it after a draft law is taken away.
#pragma once
#include "cpu/row.h"

namespace specdec::cpu {

// The draft's law at one position, over target ids.
class DraftRow {
 public:
  // A point mass on `token`.
  explicit DraftRow(int32_t token) : kind_(Kind::kPoint), token_(token) {}
  // A row of logits with its law, or of probabilities; `map` (or null) gives the draft id of each target id below map_size.
  DraftRow(const RowView& logits, const RowLaw& law, const int64_t* map, int64_t map_size)
      : kind_(Kind::kLogits), row_(logits), law_(law), map_(map), map_size_(map_size) {}
  DraftRow(const RowView& probs, const int64_t* map, int64_t map_size)
      : kind_(Kind::kProbs), row_(probs), map_(map), map_size_(map_size) {}

  bool is_point() const { return kind_ == Kind::kPoint; }
  int32_t token() const { return token_; }
  float prob(int32_t id) const;
  // Q over one tile of n target ids.
  void tile(int tile, int n, float* out) const;
  // A NaN among the probabilities given (draft_probs only).
  bool has_nan() const;

 private:
  enum class Kind { kPoint, kLogits, kProbs };
  int32_t draft_id(int32_t id) const {  // -1 where the target id is not in the draft's vocabulary
    if (map_ == nullptr) return id;
    return id < map_size_ ? int32_t(map_[id]) : -1;
  }
  float draft_prob(int32_t draft_id) const;

  Kind kind_;
  int32_t token_ = -1;
  RowView row_{};
  RowLaw law_{};
  const int64_t* map_ = nullptr;
  int64_t map_size_ = 0;
};

// A token from norm((scale * P - Q)+), or from P if `draft` is null or nothing is left.
int32_t draw_token(const RowView& row, const RowLaw& law, const RowScratch& scratch, const DraftRow* draft, float scale,
                   float uniform, bool split);

// Sum over ids of (scale * P - Q)+.
float residual_mass(const RowView& row, const RowLaw& law, const RowScratch& scratch, const DraftRow& draft,
                    float scale, bool split);

// Sum over ids of min(P, Q).
float overlap(const RowView& row, const RowLaw& law, const DraftRow& draft, bool split);

struct NoisyToken {
  float score;  // (logit - max) / T + G
  int32_t id;   // index in the row
};

// The `count` largest of log P(v) + G(key, id of v), best first, ties by lowest id; fewer if fewer ids are possible.
// `ids` (or null) gives the target id, whose noise counts, of each id of the row.
std::vector<NoisyToken> noisy_top(const RowView& row, const RowLaw& law, const RowScratch& scratch, int64_t key,
                                  const int64_t* ids, int count);

}  // namespace specdec::cpu
