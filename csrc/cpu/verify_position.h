// One position of a block: the target's law P, the draft's law Q, and the law that verification is to produce, "mixed"
// from the two.
#pragma once
#include "cpu/draw.h"

namespace specdec::cpu {

class Position {
 public:
  // The target's row, its law P and what reading it left: to be set before anything is asked.
  RowView row{};
  RowLaw p{};
  RowScratch scratch;

  // Mixes P and `draft`. What accepting a token does not need is found when it is first asked for.
  void mix(const TargetLaw& law, const DraftRow& draft, bool split);

  // The token rule, without a coin and with one.
  bool accepts(int32_t id) const { return is_cascade(law_.kind) && keeps(id) && draft_.prob(id) > 0; }
  bool accepts(int32_t id, float coin);
  // The block rule: the weight after token `id`, and the sum of what is recovered, (weight mixed - Q)+.
  float next_weight(float weight, int32_t id);
  float residual_mass(float weight);

  // A token from norm((weight mixed - Q)+); if that is empty, from a cascade's mixed law, else from P.
  int32_t recover(float weight, float uniform);
  // A token from a cascade's mixed law.
  int32_t draw(float uniform);

 private:
  // Weights (scale P - c Q)+, where c is `kept` at the ids that are kept and `other` elsewhere.
  struct Weights {
    float scale, other, kept;
  };
  Weights residual_weights(float weight) const { return {weight * mixture_.scale, 1.0f, 1.0f - weight}; }
  // Over one tile, scale P and c Q.
  void fill(const Weights& weights, int tile, float* scaled_p, float* taken_q) const;
  // Multiplies one tile of q by `kept` or `other`.
  void scale_kept(int tile, float kept, float other, float* q) const;
  std::vector<float> masses(const Weights& weights) const;
  int32_t draw_from(const Weights& weights, const std::vector<float>& mass, float uniform) const;

  // The row whose logits say what is kept.
  MappedRow deciding() const { return draft_decides(law_.kind) ? draft_.mapped() : MappedRow{row}; }
  bool keeps(int32_t id) const { return is_kept(mixture_, deciding().logit(id), deciding().own_id(id)); }
  RawRow read_raw(const RowView& row, RowLaw* law) const;
  void finish();
  float measure() const;
  void cross_entropy(int tile, float* share) const;
  float lossy_scale() const;

  TargetLaw law_{};
  DraftRow draft_{-1};
  bool split_ = false;
  Mixture mixture_{};
  Measure measure_ = Measure::kNothing;  // what `finish` has to sum
  RawRow raw_target_{}, raw_draft_{};    // of a cascade
  RowLaw raw_q_{};
};

}  // namespace specdec::cpu
