// One position of a span: the target's law P, the draft's law Q, the law that verification is to produce, "mixed" from
// the two, and what is left there to draw a token from.
#pragma once
#include "cpu/draw.h"

namespace specdec::cpu {

class Position {
 public:
  // The target's row: read it before asking anything, then call begin or mix.
  Reading target;
  Mixture mixture{};
  Remainder left{};

  // P alone.
  void begin() { left = {}; }
  // Mixes P and `draft`. What is not needed to accept a token is found when it is first asked for.
  void mix(const TargetLaw& law, const DraftLaw& draft);
  // Makes the remainder weight times the mixed law minus Q, where positive; or a cascade's law itself.
  void set_residual(float weight);
  void set_cascade();

  float p(int32_t id) const { return prob_at(target.row, target.law, id); }
  float q(int32_t id) const { return draft_.prob(id); }
  bool keeps(int32_t id) const { return is_kept(mixture, deciding().logit(id), deciding().own_id(id)); }
  // The factor of P in the token rule.
  float accept();

  // Whether nothing but P's one id can be left.
  bool certain() const { return target.law.one_hot && !left.mixed; }
  // The sum of the remainder.
  float mass() const { return mass_of(left); }
  // A token from the remainder; if that is empty, from all of a cascade's law or of P.
  int32_t draw(double uniform) const;

 private:
  Weights weights(const Remainder& remainder) const;
  float mass_of(const Remainder& remainder) const;
  // Multiplies one tile of q by `kept` at the ids that are kept and by `other` elsewhere.
  void scale_kept(int tile, float kept, float other, float* q) const;

  // The row whose logits say what is kept.
  MappedRow deciding() const { return draft_decides(law_.kind) ? draft_.mapped() : MappedRow{target.row}; }
  RawRow read_raw(const RowView& row, RowLaw* law) const;
  void finish();
  float measure() const;
  void cross_entropy(int tile, float* share) const;
  float lossy_scale() const;

  TargetLaw law_{};
  DraftLaw draft_{-1};
  Measure measure_ = Measure::kNothing;  // what `finish` has to sum
  RawRow raw_target_{}, raw_draft_{};    // of a cascade
  RowLaw raw_q_{};
};

}  // namespace specdec::cpu
