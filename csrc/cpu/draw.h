// What a token is drawn from: a row's law, what is left of it after a draft law is subtracted, or its law under noise.
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
    const int64_t own = id < map_size ? map[id] : -1;
    return own >= 0 && own < row.vocab ? int32_t(own) : -1;
  }
  // Logits of one tile of n target ids, -inf where the row has none or NaN.
  void load(int tile, int n, float* out) const;
  float logit(int32_t id) const;
};

// The draft's law at one position, over target ids.
class DraftLaw {
 public:
  // A point mass on `token`.
  explicit DraftLaw(int32_t token = -1) : kind_(Kind::kPoint), token_(token) {}
  // A row of logits with its law, or of probabilities.
  DraftLaw(const MappedRow& logits, const RowLaw& law) : kind_(Kind::kLogits), mapped_(logits), law_(law) {}
  explicit DraftLaw(const MappedRow& probs) : kind_(Kind::kProbs), mapped_(probs) {}

  bool is_point() const { return kind_ == Kind::kPoint; }
  int32_t token() const { return token_; }
  const MappedRow& mapped() const { return mapped_; }
  float prob(int32_t id) const;
  // Q over one tile of n target ids.
  void tile(int tile, int n, float* out) const;

 private:
  enum class Kind { kPoint, kLogits, kProbs };
  float own_prob(int32_t own_id) const;

  Kind kind_;
  int32_t token_ = -1;
  MappedRow mapped_{};
  RowLaw law_{};
};

// The flags of a row of draft probabilities, which tell whether it is a distribution.
int32_t status_of_probs(const RowView& probs, Team* team);

// The sum of a tile's positive probabilities; infinite if one is negative.
float sum_of_probs(const RowView& probs, int tile);

// Runs f(tile) for every tile of a row, each on any thread; returns the results.
std::vector<float> by_tile(const Reading& p, const std::function<float(int)>& f);
float sum_by_tile(const Reading& p, const std::function<float(int)>& f);

// Weights of target ids: a token is drawn in proportion to them. What they are made from must outlive them.
struct Weights {
  std::vector<float> mass;                         // of each tile
  std::function<void(int tile, float* out)> tile;  // the weights of one tile

  bool any() const;     // whether there is any mass
  float total() const;  // of the masses
  // The id at which the running sum of weights first exceeds uniform * total, tile by tile and then id by id.
  int32_t draw(double uniform) const;
  // The id within one tile at which a draw with `rest` left of its goal ends; on an overrun the last possible one.
  int32_t draw_in(int tile, double rest, float tile_mass) const;
};

// A multiple of P.
Weights weights_of(const Reading& p);

// (scale P - Q)+; if Q is a point, a multiple of P without the point.
Weights residual_weights(const Reading& p, const DraftLaw& q, float scale);

// (scaled_p - taken_q)+, both from fill(tile, scaled_p, taken_q).
Weights weights_left(const Reading& p, std::function<void(int tile, float* scaled_p, float* taken_q)> fill);

// A token from P.
int32_t draw_token(const Reading& p, double uniform);

// Sum over ids of min(P, Q).
float overlap(const Reading& p, const DraftLaw& q);

struct NoisyToken {
  float score;  // (logit - max) / T + G
  int32_t id;   // index in the row
};

// The `count` largest of log P(v) + G(key, id of v), best first, ties by lowest id; fewer if fewer ids are possible.
// `ids` (or null: those from `first` on) maps each id of the row to the target id, whose noise counts.
std::vector<NoisyToken> noisy_top(const Reading& p, int64_t key, const int64_t* ids, int count, int32_t first = 0);

}  // namespace specdec::cpu
