// The acceptance rules for the nodes of a token tree, each written once, in terms of what a sequence's rows can answer.
//
// `TreeRows` are one sequence's rows as a backend reads them, by a team of threads (the CPU's has one). All of them
// take the same branches, with the same numbers; what they share is written by one.
//
//   by_one(f)                   f() by one of the team; all see what it writes
//   for_each(n, f)              f(i) for each i < n, by any of the team; all see what is written
//   flags_of(n, f)              all flags that f(i) returns for i < n
//   flag(flags), status()       what was found wrong, in what was read or elsewhere
//   coin(node)                  a node's uniform; the root's is the final draw's
//
// A target row at a time, for rules that ask for no more:
//
//   read(node, whole)           reads a node's row: P is its law, with nothing cut from it if `whole`
//   law(), p(id), entropy()     of P
//   mix(node)                   makes P the cascade's law; reads the draft's row
//   draw(uniform)               a token from P
//   noisy(node)                 the token that a node's noise picks from P
//
// `Laws`, a SiblingLaws, for those that reject children one by one:
//
//   read(laws, node, drafted)   reads a node's target row, and its draft row if children are to be tried
//   sums(laws, scale, taken)    RejectionSums
//   draw(laws, uniform)         a token from P as it is now
#pragma once
#include "common/chain_rules.h"
#include "common/siblings.h"
#include "common/tree.h"

namespace specdec {

// Typical acceptance (Cai et al., arXiv 2401.10774, section 2.3.1): how likely a child must be, at least.
SPECDEC_HD float typical_threshold(float epsilon, float delta, float entropy) {
  return fminf(epsilon, delta * expf(-entropy));
}

// What a rule decides: the last accepted node, and the token after it (or kNothing).
struct TreeOutcome {
  int32_t node;
  int64_t final;
};

template <class TreeRows>
class TreeRules {
 public:
  using Laws = typename TreeRows::Laws;

  // A node on the current path, and its remaining weight.
  struct Level {
    Laws laws;
    int32_t node;
    float w;
    bool read;  // its rows have been
  };

  // What the team shares.
  struct Memory {
    Level levels[kMostDepth + 1];
    int32_t removed[kMostNodes];   // the children rejected on the current path, each node's after its parent's
    float likelihood[kMostNodes];  // typical acceptance: the log-likelihood of an accepted node
    int8_t depth[kMostNodes];      // and its depth; -1: not accepted
  };

  SPECDEC_MEMBER TreeRules(const VerifyTreeArgs& args, int64_t b, TreeRows& rows, Memory& memory)
      : args_(args), tree_(args, b), b_(b), rows_(rows), memory_(memory) {}

  SPECDEC_MEMBER TreeOutcome decide() {
    if (tree_.token(kRoot) == -1) return {kRoot, Outcome::kNothing};  // the sequence idles
    rows_.flag(rows_.flags_of(tree_.size(), [&](int32_t node) { return tree_.is_bad(node) ? kBadToken : 0; }));
    switch (args_.acceptance) {
      case TreeAcceptance::kTypical:
        return typical();
      case TreeAcceptance::kRecursive:
        return recursive();
      case TreeAcceptance::kTraversal:
        return traversal();
      default:
        return walk();
    }
  }

  // The sequence's outputs.
  SPECDEC_MEMBER void write(const TreeOutcome& outcome) {
    int64_t* tokens = args_.tokens + b_ * (args_.max_depth + 1);
    int64_t* nodes = args_.accepted_nodes + b_ * args_.max_depth;
    rows_.for_each(args_.max_depth + 1, [&](int64_t i) {
      tokens[i] = -1;
      if (i < args_.max_depth) nodes[i] = -1;
    });
    rows_.by_one([&] {
      int64_t accepted = 0;
      for (int32_t node = outcome.node; node > kRoot; node = tree_.parent(node)) ++accepted;
      int32_t node = outcome.node;
      for (int64_t d = accepted - 1; d >= 0; --d, node = tree_.parent(node)) {
        nodes[d] = node;
        tokens[d] = tree_.token(node);
      }
      if (outcome.final >= 0) tokens[accepted] = outcome.final;
      args_.num_accepted[b_] = int32_t(accepted);
      args_.num_tokens[b_] = int32_t(accepted + (outcome.final >= 0));
      args_.status[b_] = rows_.status();
    });
  }

 private:
  // Whether what is below a node of this depth belongs to the tree: a tree deeper than declared ends there.
  SPECDEC_MEMBER bool goes_below(int64_t depth) const { return depth < args_.max_depth; }

  SPECDEC_MEMBER int32_t first_child(int32_t node, int64_t depth) const {
    return goes_below(depth) ? tree_.first_child(node) : kNone;
  }

  // Sample, greedy, match: from a node to the child whose token the target itself draws there, if there is one.
  SPECDEC_MEMBER TreeOutcome walk() {
    int32_t node = kRoot;
    for (int64_t depth = 0; !tree_.is_eos(node); ++depth) {
      const int64_t wanted = wanted_at(node);
      const int32_t child = goes_below(depth) ? tree_.child_with(node, wanted) : kNone;
      if (child < 0) return {node, wanted};
      node = child;
    }
    return {node, Outcome::kNothing};
  }

  SPECDEC_MEMBER int64_t wanted_at(int32_t node) {
    rows_.read(node, false);
    if (args_.acceptance == TreeAcceptance::kSample) {
      if (!is_cascade(args_.law.kind) || !(args_.law.cascade_bonus || tree_.has_usable_child(node))) return drawn(node);
      rows_.mix(node);
      return rows_.draw(rows_.coin(node));
    }
    return has_noise(args_) && !rows_.law().one_hot ? rows_.noisy(node) : rows_.law().argmax;
  }

  // A token drawn from the law of the row that was read, with the coin of a node.
  SPECDEC_MEMBER int64_t drawn(int32_t node) {
    return rows_.law().one_hot ? rows_.law().argmax : rows_.draw(rows_.coin(node));
  }

  // Typical acceptance: accepts children that are likely enough, given how uncertain the target is. Of the deepest
  // accepted nodes the likeliest counts.
  SPECDEC_MEMBER TreeOutcome typical() {
    const auto& depth = memory_.depth;
    const auto& likelihood = memory_.likelihood;
    rows_.for_each(tree_.size(), [&](int32_t node) {
      memory_.depth[node] = node == kRoot ? 0 : -1;
      memory_.likelihood[node] = 0.0f;
    });
    int32_t best = kRoot;
    for (int32_t node = kRoot; node < tree_.size(); ++node) {
      if (depth[node] < 0) continue;
      if (depth[node] > depth[best] || (depth[node] == depth[best] && likelihood[node] > likelihood[best])) best = node;
      if (!goes_below(depth[node]) || !tree_.has_usable_child(node)) continue;
      rows_.read(node, true);
      const float least = typical_threshold(args_.epsilon, args_.delta, rows_.entropy());
      rows_.by_one([&] {
        for (int32_t child = tree_.first_child(node); child >= 0; child = tree_.next_sibling(child)) {
          if (!tree_.usable(child)) continue;
          const float p = rows_.p(int32_t(tree_.token(child)));
          if (!(p > least)) continue;
          memory_.depth[child] = int8_t(depth[node] + 1);
          memory_.likelihood[child] = likelihood[node] + logf(p);
        }
      });
    }
    if (tree_.is_eos(best)) return {best, Outcome::kNothing};
    rows_.read(best, false);
    return {best, drawn(kRoot)};
  }

  // Recursive rejection (Miao et al., arXiv 2305.09781; Chen et al., arXiv 2402.12374): children are tried in order by
  // the token rule, against P and Q as the rejections before have left them.
  SPECDEC_MEMBER TreeOutcome recursive() {
    enter(0, kRoot, 1.0f);
    int64_t depth = 0;
    int32_t child = first_child(kRoot, depth);
    while (child >= 0) {
      if (tree_.usable(child)) {
        const Laws& laws = read(0, true);
        const int32_t x = int32_t(tree_.token(child));
        const float p = laws.p(x), q = laws.q(x);
        if (!can_give(q)) {
          rows_.flag(kBadDraft);
        } else if (accept_token(rows_.coin(child), p, q)) {
          enter(0, child, 1.0f);
          child = first_child(child, ++depth);
          continue;
        } else {
          reject(0, x);
        }
      }
      child = tree_.next_sibling(child);
    }
    return stop_at(0);
  }

  // Traversal (Weng et al., arXiv 2505.12398): from the leaves up, by the block rule. A node whose children are all rejected
  // is accepted with the weight that is left to it.
  SPECDEC_MEMBER TreeOutcome traversal() {
    int level = 0;
    enter(0, kRoot, 1.0f);
    int32_t child = first_child(kRoot, level);
    for (;;) {
      const Level& at = memory_.levels[level];
      if (child < 0) {
        if (at.node == kRoot || rows_.coin(at.node) < at.w) return stop_at(level);
        child = at.node;
        Level& above = memory_.levels[--level];
        const float left = reject(level, int32_t(tree_.token(child)));
        rows_.by_one([&] { above.w = block_threshold(above.w, left); });
      } else if (tree_.usable(child)) {
        const Laws& laws = read(level, true);
        const int32_t x = int32_t(tree_.token(child));
        const float p = laws.p(x), q = laws.q(x);
        if (can_give(q)) {
          enter(++level, child, next_block_weight(at.w, p, q));
          child = first_child(child, level);
          continue;
        }
        rows_.flag(kBadDraft);
      }
      child = tree_.next_sibling(child);
    }
  }

  // Puts a node at a level, its rows not yet read.
  SPECDEC_MEMBER void enter(int level, int32_t node, float w) {
    rows_.by_one([&] {
      Level& at = memory_.levels[level];
      const Laws* above = level > 0 ? &memory_.levels[level - 1].laws : nullptr;
      at.node = node;
      at.w = w;
      at.read = false;
      at.laws.left = Siblings{};
      at.laws.changed = false;
      at.laws.removed = above ? above->removed + above->num_removed : memory_.removed;
      at.laws.num_removed = 0;
    });
  }

  // The laws of the node at a level; of Q only if children are to be tried.
  SPECDEC_MEMBER const Laws& read(int level, bool drafted) {
    Level& at = memory_.levels[level];
    if (at.read) return at.laws;
    rows_.read(at.laws, at.node, drafted);
    rows_.by_one([&] { at.read = true; });
    return at.laws;
  }

  // Rejects child x of the node at a level: P becomes norm((w P - Q)+), unless that is empty, and x leaves Q (and P, as
  // a child is rejected only where w P < Q). Returns the sum of (w P - Q)+.
  SPECDEC_MEMBER float reject(int level, int32_t x) {
    Laws& laws = memory_.levels[level].laws;
    const float w = memory_.levels[level].w, p = laws.p(x);
    rows_.by_one([&] { laws.removed[laws.num_removed++] = x; });
    const RejectionSums sums = rows_.sums(laws, rejected_scale(laws.left, w), rejected_taken(laws.left, w));
    rows_.by_one([&] {
      laws.left = after_rejection(laws.left, w, x, p, laws.changed, sums);
      laws.changed = laws.changed || sums.residual > 0;
    });
    return sums.residual;
  }

  // The outcome if the node at a level is the last one accepted.
  SPECDEC_MEMBER TreeOutcome stop_at(int level) {
    const int32_t node = memory_.levels[level].node;
    if (tree_.is_eos(node)) return {node, Outcome::kNothing};
    const Laws& laws = read(level, false);
    const int32_t known = laws.certain_id();
    return {node, known >= 0 ? known : rows_.draw(laws, rows_.coin(kRoot))};
  }

  const VerifyTreeArgs& args_;
  const Tree tree_;
  const int64_t b_;
  TreeRows& rows_;
  Memory& memory_;
};

}  // namespace specdec
