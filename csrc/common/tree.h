// The token tree of one sequence: its nodes' links and tokens.
#pragma once
#include "common/span.h"

namespace specdec {

constexpr int32_t kRoot = 0, kNone = -1;  // nodes

class Tree {
 public:
  SPECDEC_MEMBER Tree(const VerifyTreeArgs& args, int64_t b)
      : args_(args), first_(b * args.num_nodes), link_(args.tree_per_sequence ? first_ : 0) {}

  SPECDEC_MEMBER int32_t size() const { return int32_t(args_.num_nodes); }

  SPECDEC_MEMBER int32_t parent(int32_t node) const {
    const int32_t to = link(args_.parents, node);
    return to < node ? to : kNone;
  }
  // An EOS has no children.
  SPECDEC_MEMBER int32_t first_child(int32_t node) const {
    const int32_t to = is_eos(node) ? kNone : link(args_.first_child, node);
    return to > node && parent(to) == node ? to : kNone;
  }
  SPECDEC_MEMBER int32_t next_sibling(int32_t node) const {
    const int32_t to = link(args_.next_sibling, node);
    return to > node && parent(to) == parent(node) ? to : kNone;
  }

  SPECDEC_MEMBER int64_t token(int32_t node) const { return id_at(args_.node_tokens, first_ + node); }
  SPECDEC_MEMBER bool usable(int32_t node) const { return token(node) >= 0 && token(node) < args_.target.vocab; }
  SPECDEC_MEMBER bool is_eos(int32_t node) const { return node > kRoot && specdec::is_eos(args_, token(node)); }
  // A node of the tree whose token is neither an id nor a placeholder.
  SPECDEC_MEMBER bool is_bad(int32_t node) const { return parent(node) >= 0 && !usable(node) && token(node) != -1; }

  SPECDEC_MEMBER int32_t child_with(int32_t node, int64_t id) const {
    int32_t child = first_child(node);
    while (child >= 0 && token(child) != id) child = next_sibling(child);
    return child;
  }
  SPECDEC_MEMBER bool has_usable_child(int32_t node) const {
    int32_t child = first_child(node);
    while (child >= 0 && !usable(child)) child = next_sibling(child);
    return child >= 0;
  }

 private:
  // A link that leads out of the tree counts as kNone: whatever is given, nothing is read out of bounds and no node is
  // reached twice.
  SPECDEC_MEMBER int32_t link(const int64_t* links, int32_t node) const {
    const int64_t to = links[link_ + node];
    return to >= 0 && to < args_.num_nodes ? int32_t(to) : kNone;
  }

  const VerifyTreeArgs& args_;
  const int64_t first_, link_;  // of node 0: in the flat arrays, and in those of links
};

// Where the nodes' rows are: node i's is number i of its sequence.
SPECDEC_HD Span tree_span(const VerifyTreeArgs& args, int64_t b) {
  Span span;
  span.batch = span.draft_batch = b;
  span.target_index = span.draft_index = b * args.num_nodes;
  span.status = args.tree_status[args.tree_per_sequence ? b : 0];
  return span;
}

SPECDEC_HD Drafted drafted_of(const VerifyTreeArgs& args, int64_t b) {
  Drafted out{};
  out.tokens = args.node_tokens;
  out.first = b * args.num_nodes;
  out.parents = args.parents + (args.tree_per_sequence ? out.first : 0);
  return out;
}

SPECDEC_HD Sampling target_sampling(const VerifyTreeArgs& args, int64_t b) {
  const Sampling s = sampling_of(args.params, b);
  return args.acceptance == TreeAcceptance::kGreedy ? made_greedy(s) : s;
}

// The same parameters with nothing cut.
SPECDEC_HD Sampling untruncated(Sampling s) {
  s.top_k = 0;
  s.top_p = 1.0f;
  s.min_p = 0.0f;
  return s;
}

}  // namespace specdec
