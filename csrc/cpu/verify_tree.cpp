// verify_tree: one sequence at a time; only rows that the rule gets to are read.
#include <cmath>

#include "common/tree_rules.h"
#include "cpu/ops.h"
#include "cpu/parallel.h"
#include "cpu/siblings.h"
#include "cpu/verify_position.h"
#include "cpu/verify_rows.h"

namespace specdec::cpu {
namespace {

// The answers of a sequence's rows to common/tree_rules.h.
class TreeRows : SequenceRows {
 public:
  using Laws = NodeLaws;

  TreeRows(const VerifyTreeArgs& args, int64_t b, Position& at, Team* team)
      : SequenceRows(args, b, tree_span(args, b), target_sampling(args, b), team), at_(at) {
    drafted_ = drafted_of(args, b);
  }

  static void by_one(auto f) { f(); }
  static void for_each(int64_t n, auto f) {
    for (int32_t i = 0; i < n; ++i) f(i);
  }
  static int32_t flags_of(int64_t n, auto f) {
    int32_t flags = 0;
    for_each(n, [&](int32_t i) { flags |= f(i); });
    return flags;
  }

  void flag(int32_t flags) { status_ |= flags; }
  int32_t status() const { return status_; }
  double coin(int32_t node) { return uniform(node); }

  void read(int32_t node, bool whole) {
    if (whole) {
      read_row(target_row(node), untruncated(target_sampling_), team_, at_.target);
      flag(at_.target.law.status);
    } else {
      read_target_row(node, at_.target);
    }
    at_.begin();
  }
  const RowLaw& law() const { return at_.target.law; }
  float p(int32_t id) const { return at_.p(id); }
  float entropy() const;
  void mix(int32_t node) {
    at_.mix(args_.law, draft_law(node, kNone));
    at_.set_cascade();
  }
  int64_t draw(double uniform) const { return at_.draw(uniform); }
  int64_t noisy(int32_t node) const { return noisy_top(at_.target, key_at(args_, span_, b_, node), nullptr, 1)[0].id; }

  void read(NodeLaws& laws, int32_t node, bool drafted) {
    read_target_row(node, laws);
    laws.draft = drafted ? draft_law(node, kNone) : DraftLaw(kNone);
  }
  static RejectionSums sums(const NodeLaws& laws, float scale, float taken) { return laws.sums(scale, taken); }
  static int64_t draw(const NodeLaws& laws, double uniform) { return laws.draw(uniform); }

 private:
  Position& at_;
};

// In nats.
float TreeRows::entropy() const {
  const RowView& row = at_.target.row;
  const RowLaw& law = at_.target.law;
  if (law.one_hot) return 0.0f;
  const float sum = sum_by_tile(at_.target, [&](int tile) {
    float p[kTile], logit[kTile];
    const int n = row.tile_size(tile);
    tile_probs(row, law, tile, 1.0f, p);
    row.kernels().load(row.tile(tile), n, logit);
    for (int i = 0; i < n; ++i) p[i] = p[i] > 0 ? p[i] * ((law.max - logit[i]) * law.inverse_temperature) : 0.0f;
    return kernels().sum(p, n);
  });
  return logf(law.normalizer) + sum;
}

}  // namespace

void verify_tree(const VerifyTreeArgs& args) {
  for_each_row(args.batch, args.num_nodes * args.target.vocab, [&](int64_t b, Team* team) {
    thread_local Position at;
    thread_local TreeRules<TreeRows>::Memory memory;
    TreeRows rows(args, b, at, team);
    TreeRules<TreeRows> rules(args, b, rows, memory);
    rules.write(rules.decide());
  });
}

}  // namespace specdec::cpu
