// verify_tree: one sequence at a time, rows read only where the rule gets to.
#include <algorithm>
#include <cmath>

#include "common/ids.h"
#include "common/status.h"
#include "cpu/ops.h"
#include "cpu/parallel.h"
#include "cpu/verify_position.h"
#include "cpu/verify_rows.h"
#include "cpu/verify_siblings.h"

namespace specdec::cpu {
namespace {

constexpr int32_t kRoot = 0, kNone = -1;

class TreeSequence : SequenceRows {
 public:
  TreeSequence(const VerifyTreeArgs& args, int64_t b, bool split)
      : SequenceRows(args, b, span_of(args, b), sampling_at(args, b), split), tree_(args) {
    link_ = args.tree_per_sequence ? b * args.num_nodes : 0;
    status_ = args.tree_status[args.tree_per_sequence ? b : 0];
  }

  void run() {
    int64_t *tokens = args_.tokens + b_ * (tree_.max_depth + 1), *nodes = tree_.accepted_nodes + b_ * tree_.max_depth;
    std::fill(tokens, tokens + tree_.max_depth + 1, -1);
    std::fill(nodes, nodes + tree_.max_depth, -1);
    int64_t accepted = 0, emitted = 0;
    if (token(kRoot) != -1) {
      look_at_tokens();
      const int64_t final = decide();
      for (int32_t node = node_; node > kRoot && accepted < tree_.max_depth; node = parent(node)) ++accepted;
      int32_t node = node_;
      for (int64_t d = accepted - 1; d >= 0; --d, node = parent(node)) nodes[d] = node, tokens[d] = token(node);
      if (final >= 0) tokens[accepted] = final;
      emitted = accepted + (final >= 0);
    }
    args_.num_accepted[b_] = int32_t(accepted);
    args_.num_tokens[b_] = int32_t(emitted);
    args_.status[b_] = status_;
  }

 private:
  static Span span_of(const VerifyTreeArgs& args, int64_t b) {
    Span span;
    span.batch = b;
    span.target_index = span.draft_index = b * args.num_nodes;
    return span;
  }
  static Sampling sampling_at(const VerifyTreeArgs& args, int64_t b) {
    const Sampling s = sampling_of(args.params, b);
    return args.acceptance == TreeAcceptance::kGreedy ? made_greedy(s) : s;
  }

  // Of a link that is none of this tree: -1, so that whatever is given nothing is read out of bounds, and no node is
  // reached twice.
  int32_t link(const int64_t* links, int32_t node) const {
    const int64_t to = links[link_ + node];
    return to >= 0 && to < tree_.num_nodes ? int32_t(to) : kNone;
  }
  int32_t parent(int32_t node) const {
    const int32_t to = link(tree_.parents, node);
    return to < node ? to : kNone;
  }
  int32_t first_child(int32_t node) const {
    if (is_eos(node)) return kNone;
    const int32_t to = link(tree_.first_child, node);
    return to > node && parent(to) == node ? to : kNone;
  }
  int32_t next_sibling(int32_t node) const {
    const int32_t to = link(tree_.next_sibling, node);
    return to > node && parent(to) == parent(node) ? to : kNone;
  }

  int64_t token(int32_t node) const { return id_at(tree_.node_tokens, b_ * tree_.num_nodes + node); }
  bool usable(int32_t node) const { return token(node) >= 0 && token(node) < args_.target.vocab; }
  bool is_eos(int32_t node) const {
    const int64_t* end = args_.eos_token_ids + args_.num_eos;
    return node > kRoot && std::find(args_.eos_token_ids, end, token(node)) != end;
  }

  void look_at_tokens() {
    for (int32_t node = 1; node < tree_.num_nodes; ++node)
      if (parent(node) >= 0 && !usable(node) && token(node) != -1) status_ |= kBadToken;
  }

  // Leaves the last accepted node in node_; the token after it, or -1.
  int64_t decide() {
    switch (tree_.acceptance) {
      case TreeAcceptance::kTypical:
        return typical();
      case TreeAcceptance::kRecursive:
        return recursive();
      case TreeAcceptance::kTraversal:
        visit(kRoot, 0, 1.0f);
        return final_of(levels()[size_t(level_)]);
      default:
        return walk();
    }
  }

  // The child of node_ that is this token.
  int32_t child_with(int64_t id) const {
    for (int32_t child = first_child(node_); child >= 0; child = next_sibling(child))
      if (token(child) == id) return child;
    return kNone;
  }

  bool has_usable_child(int32_t node) const {
    for (int32_t child = first_child(node); child >= 0; child = next_sibling(child))
      if (usable(child)) return true;
    return false;
  }

  // The deterministic-children rule.
  int64_t walk() {
    for (;;) {
      if (is_eos(node_)) return -1;
      const int64_t wanted = wanted_at_node();
      const int32_t child = child_with(wanted);
      if (child < 0) return wanted;
      node_ = child;
    }
  }

  int64_t wanted_at_node() {
    thread_local Position position;
    read_target_row(node_, position.target);
    position.begin();
    const RowLaw& law = position.target.law;
    if (tree_.acceptance == TreeAcceptance::kSample) {
      if (args_.law.kind != LawKind::kLossless && (args_.law.cascade_bonus || has_usable_child(node_))) {
        position.mix(args_.law, draft_law(node_, -1));
        position.set_cascade();
        return position.draw(uniform(node_));
      }
      if (law.one_hot) return law.argmax;
      return position.draw(uniform(node_));
    }
    if (args_.noise_keys == nullptr || law.one_hot) return law.argmax;
    return noisy_top(position.target, args_.noise_keys[span_.target_index + node_], nullptr, 1)[0].id;
  }

  int64_t typical() {
    thread_local Reading read;
    std::vector<int> depth(tree_.num_nodes, -1);
    std::vector<float> likelihood(tree_.num_nodes);
    depth[kRoot] = 0;
    for (int32_t node = 0; node < tree_.num_nodes; ++node) {
      if (depth[node] < 0) continue;
      if (depth[node] > depth[node_] || (depth[node] == depth[node_] && likelihood[node] > likelihood[node_]))
        node_ = node;
      if (!has_usable_child(node)) continue;
      const RowView row = row_view(args_.target, b_, node);
      const Sampling whole{target_sampling_.temperature,
                           target_sampling_.inverse_temperature,
                           0,
                           1.0f,
                           0.0f,
                           false,
                           target_sampling_.greedy,
                           target_sampling_.status};
      read_row(row, whole, split_, read);
      const RowLaw& law = read.law;
      status_ |= law.status;
      const float least = typical_threshold(tree_.epsilon, tree_.delta, entropy(row, law));
      for (int32_t child = first_child(node); child >= 0; child = next_sibling(child)) {
        if (!usable(child)) continue;
        const float p = prob_at(row, law, int32_t(token(child)));
        if (!(p > least)) continue;
        depth[child] = depth[node] + 1;
        likelihood[child] = likelihood[node] + logf(p);
      }
    }
    if (is_eos(node_)) return -1;
    read_target_row(node_, read);
    return read.law.one_hot ? read.law.argmax : draw_token(read, uniform(0));
  }

  // Of a law that nothing was cut from, in nats.
  float entropy(const RowView& row, const RowLaw& law) const {
    if (law.one_hot) return 0.0f;
    std::vector<float> share(row.tiles());
    for_each_tile(row, split_, [&](int tile) {
      float p[kTile], logit[kTile];
      const int n = row.tile_size(tile);
      tile_probs(row, law, tile, 1.0f, p);
      row.kernels().load(row.at(tile * kTile), n, logit);
      for (int i = 0; i < n; ++i) p[i] = p[i] > 0 ? p[i] * ((law.max - logit[i]) * law.inverse_temperature) : 0.0f;
      share[tile] = kernels().sum(p, n);
    });
    float sum = 0;
    for (float s : share) sum += s;
    return logf(law.normalizer) + sum;
  }

  // Reads a node's target row into `at`.
  void open(int32_t node, SiblingLaws& at) {
    read_target_row(node, at.target);
    at.begin(DraftLaw(-1));
  }

  int64_t final_of(SiblingLaws& at) {
    if (is_eos(node_)) return -1;
    if (at.certain()) return at.target.law.argmax;
    return at.draw(uniform(0));
  }

  int64_t recursive() {
    thread_local SiblingLaws at;
    open(kRoot, at);
    int32_t child = first_child(kRoot);
    bool begun = false;  // whether the draft's row at node_ was read
    while (child >= 0) {
      const int32_t x = int32_t(token(child));
      if (!usable(child)) {
        child = next_sibling(child);
        continue;
      }
      if (!begun) at.begin(draft_law(node_, -1));
      begun = true;
      const float q = at.draft_prob(x);
      if (!(q > 0)) {
        status_ |= kBadToken;
      } else if (accept_token(uniform(child), at.prob(x), q)) {
        node_ = child;
        if (is_eos(node_)) return -1;
        open(node_, at);
        begun = false;
        child = first_child(node_);
        continue;
      } else {
        at.reject(x, 1.0f);
      }
      child = next_sibling(child);
    }
    return final_of(at);
  }

  static std::vector<SiblingLaws>& levels() {
    thread_local std::vector<SiblingLaws> levels;
    return levels;
  }

  // Whether `node`, entered with weight w at a level of the tree, or something below it is accepted; if so node_ and level_
  // say which, and levels()[level_] has its laws (unless it is an EOS).
  bool visit(int32_t node, int level, float w) {
    if (int(levels().size()) <= level) levels().resize(size_t(level) + 1);
    bool opened = false;
    for (int32_t child = first_child(node); child >= 0; child = next_sibling(child)) {
      if (!usable(child)) continue;
      SiblingLaws& at = levels()[size_t(level)];
      if (!opened) {
        open(node, at);
        at.begin(draft_law(node, -1));
        opened = true;
      }
      const int32_t x = int32_t(token(child));
      const float p = at.prob(x), q = at.draft_prob(x);
      if (!(q > 0)) {
        status_ |= kBadToken;
        continue;
      }
      if (level < tree_.max_depth && visit(child, level + 1, next_block_weight(w, p, q))) return true;
      w = block_threshold(w, levels()[size_t(level)].reject(x, w));
    }
    if (node != kRoot && !(uniform(node) < w)) return false;
    node_ = node;
    level_ = level;
    if (!opened && !is_eos(node)) open(node, levels()[size_t(level)]);
    return true;
  }

  const VerifyTreeArgs& tree_;
  int64_t link_ = 0;  // of node 0's links
  int32_t node_ = kRoot;
  int level_ = 0;
};

}  // namespace

void verify_tree(const VerifyTreeArgs& args) {
  for_each_row(args.batch, [&](int64_t b, bool split) { TreeSequence(args, b, split).run(); });
}

}  // namespace specdec::cpu
