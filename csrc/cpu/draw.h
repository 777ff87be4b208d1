// Draws from a row's law, or from what is left of it after a draft law is taken away.
#pragma once
#include "cpu/row.h"

namespace specdec::cpu {

// A row of logits or probabilities by target id: `map` (or null) gives the row's own id of each target id below
// map_size.
struct MappedRow {
  RowView row;
  const int64_t* map = nullptr;
  int64_t map_size = 0;

  int32_t own_id(int32_t id) const {  // -1 where the row does not have the target id
    if (map == nullptr) return id;
    return id < map_size ? int32_t(map[id]) : -1;
  }
  // Logits of one tile of n target ids, -inf where the row has none or NaN.
  void load(int tile, int n, float* out) const;
  float logit(int32_t id) const;
};

// The draft's law at one position, over target ids.
class DraftRow {
 public:
  // A point mass on `token`.
  explicit DraftRow(int32_t token) : kind_(Kind::kPoint), token_(token) {}
  // A row of logits with its law, or of probabilities.
  DraftRow(const MappedRow& logits, const RowLaw& law) : kind_(Kind::kLogits), mapped_(logits), law_(law) {}
  explicit DraftRow(const MappedRow& probs) : kind_(Kind::kProbs), mapped_(probs) {}

  bool is_point() const { return kind_ == Kind::kPoint; }
  int32_t token() const { return token_; }
  const MappedRow& mapped() const { return mapped_; }
  float prob(int32_t id) const;
  // Q over one tile of n target ids.
  void tile(int tile, int n, float* out) const;
  // A NaN among the probabilities given (draft_probs only).
  bool has_nan() const;

 private:
  enum class Kind { kPoint, kLogits, kProbs };
  float own_prob(int32_t own_id) const;

  Kind kind_;
  int32_t token_ = -1;
  MappedRow mapped_{};
  RowLaw law_{};
};

// The id at which the running sum of weights first exceeds uniform * total. `mass` holds the tiles' sums;
// weights(tile, out) writes the weights of one tile and returns how many.
int32_t draw_from_tiles(const std::vector<float>& mass, float uniform, const std::function<int(int, float*)>& weights);

// Whether any tile has mass.
bool any(const std::vector<float>& mass);

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
