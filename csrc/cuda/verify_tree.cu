// verify_tree with a block (or a cluster of them) a sequence: of all the rows of a tree only those are read that the rule
// gets to.
#include "cuda/siblings.cuh"
#include "cuda/strategy.h"
#include "cuda/walk.cuh"

namespace specdec::cuda {
namespace {

constexpr int32_t kRoot = 0, kNone = -1;
constexpr int kMostLevels = kMostDepth + 1;

// Numbers that a sequence's rows leave behind: two tables and two rows of sums.
int64_t numbers_of(const VerifyArgs& args) {
  const int64_t tiles = (args.target.vocab + kTile - 1) / kTile;
  const int32_t draft_vocab = args.draft.data ? args.draft.vocab : args.draft_probs.data ? args.draft_probs.vocab : 0;
  const int64_t draft_tiles = (draft_vocab + kTile - 1) / kTile;
  return (tiles + draft_tiles) * TileTable::kNumbers + 2 * tiles;
}

// A node on the path in hand.
struct Level {
  SiblingLaws laws;
  int32_t node;
  float w;
  bool read;  // its rows were
};

// Typical acceptance: how each node stands.
struct Typical {
  float likelihood[kMostNodes];
  int8_t depth[kMostNodes];  // -1: not accepted
};

// What all threads of a block know alike.
struct State {
  Span span;
  Reading target, draft;
  Mixing mixing;
  Remainder now;
  float *sums, *more_sums;  // of tiles
};

// One sequence. Every thread of every block of the team goes the same way, with the same numbers.
template <bool kClustered>
class TreeWalk {
 public:
  using Group = Team<kClustered>;

  // `list`: of kMaxListed floats, if rows may be cut; `numbers`: see numbers_of.
  __device__ TreeWalk(const VerifyTreeArgs& tree, int64_t b, State& state, Level* levels, int32_t* removed,
                      Typical& typical, float* list, float* numbers)
      : tree_(tree), args_(tree), state_(state), levels_(levels), removed_(removed), typical_(typical), b_(b) {
    const int64_t link = tree.tree_per_sequence ? b * tree.num_nodes : 0;
    parents_ = tree.parents + link;
    first_child_ = tree.first_child + link;
    next_sibling_ = tree.next_sibling + link;
    status_ = tree.tree_status[tree.tree_per_sequence ? b : 0];
    by_one([&] {
      Span& span = state.span = Span{};
      span.batch = b;
      span.draft_index = span.target_index = span.draft_row_index = b * tree.num_nodes;
      state.sums = numbers + tiles() * TileTable::kNumbers;
      state.more_sums = state.sums + tiles();
      state.target.list = state.draft.list = list;
      const Sampling s = sampling_of(args_.params, b);
      state.target.sampling = tree.acceptance == TreeAcceptance::kGreedy ? made_greedy(s) : s;
      state.target.table = TileTable(numbers, tiles());
      state.draft.sampling = draft_sampling(args_, b);
      if (has_draft(args_)) state.draft.table = TileTable(state.more_sums + tiles(), draft_row(args_, span, 0).tiles());
      state.now.cut = cut_of(state.target.sampling, args_.target.vocab).any;
    });
  }

  __device__ void run() {
    int64_t final = Outcome::kNothing;
    const bool idle = token(kRoot) == -1;
    if (!idle) {
      look_at_tokens();
      switch (tree_.acceptance) {
        case TreeAcceptance::kTypical:
          final = typical();
          break;
        case TreeAcceptance::kRecursive:
          final = recursive();
          break;
        case TreeAcceptance::kTraversal:
          final = traversal();
          break;
        default:
          final = walk();
      }
    }
    if (Group::rank() == 0) write(idle, final);
    Group::sync();  // no block may end while another could still write into its shared memory
  }

 private:
  __device__ int tiles() const { return (args_.target.vocab + kTile - 1) / kTile; }

  // Of a link that is none of this tree: -1, so that whatever is given nothing is read out of bounds, and no node is
  // reached twice.
  __device__ int32_t link(const int64_t* links, int32_t node) const {
    const int64_t to = links[node];
    return to >= 0 && to < tree_.num_nodes ? int32_t(to) : kNone;
  }
  __device__ int32_t parent(int32_t node) const {
    const int32_t to = link(parents_, node);
    return to < node ? to : kNone;
  }
  __device__ int32_t first_child(int32_t node) const {
    const int32_t to = is_eos_node(node) ? kNone : link(first_child_, node);
    return to > node && parent(to) == node ? to : kNone;
  }
  __device__ int32_t next_sibling(int32_t node) const {
    const int32_t to = link(next_sibling_, node);
    return to > node && parent(to) == parent(node) ? to : kNone;
  }
  __device__ int64_t token(int32_t node) const { return id_at(tree_.node_tokens, b_ * tree_.num_nodes + node); }
  __device__ bool usable(int32_t node) const { return token(node) >= 0 && token(node) < args_.target.vocab; }
  __device__ bool is_eos_node(int32_t node) const { return node > kRoot && is_eos(args_, token(node)); }
  __device__ float uniform(int32_t node) { return uniform_at(args_, state_.span, node, &status_); }

  __device__ void look_at_tokens() {
    int32_t flags = 0;
    for (int32_t node = 1 + int32_t(threadIdx.x); node < tree_.num_nodes; node += int32_t(blockDim.x))
      if (parent(node) >= 0 && !usable(node) && token(node) != -1) flags = kBadToken;
    status_ |= block_reduce(flags, 0, Or{});
  }

  __device__ bool has_usable_child(int32_t node) const {
    for (int32_t child = first_child(node); child >= 0; child = next_sibling(child))
      if (usable(child)) return true;
    return false;
  }

  // Reads a node's target row into `now`, without a draft; its flags count from here on.
  __device__ void read_target(int32_t node, bool raw) {
    by_one([&] { state_.target.row = target_row(args_, state_.span, node); });
    read_row<kClustered>(state_.target, raw ? &state_.mixing.target : nullptr);
    by_one([&] {
      state_.mixing.measure = Measure::kNothing;
      state_.now = {state_.target.row, state_.target.law, state_.now.cut, 1.0f, DraftLaw{}};
    });
    status_ |= state_.now.law.status;
  }

  // And the draft's, whose flags count too.
  __device__ void read_draft(int32_t node, bool raw) {
    if (reads_draft(args_)) {
      by_one([&] { state_.draft.row = draft_row(args_, state_.span, node); });
      read_row<kClustered>(state_.draft, raw ? &state_.mixing.draft : nullptr);
    }
    by_one([&] {
      if (args_.draft_probs.data) state_.draft.law = flags_alone(state_.draft.law);
      state_.now.draft = draft_law(args_, state_.span, b_, node, state_.draft.law, -1);
    });
    status_ |= state_.now.draft.law.status;
  }

  template <class From>
  __device__ int64_t draw_from(const From& from, float u) {
    Group::sync();  // the sums may still be in use
    masses_of<kClustered>(from, state_.target.table, state_.sums, int(Group::rank()), int(Group::size()));
    Group::sync();
    return max(draw(from, state_.sums, u), 0);
  }

  // The deterministic-children rule.
  __device__ int64_t walk() {
    for (;;) {
      if (is_eos_node(node_)) return Outcome::kNothing;
      const int64_t wanted = wanted_at_node();
      int32_t child = first_child(node_);
      while (child >= 0 && token(child) != wanted) child = next_sibling(child);
      if (child < 0) return wanted;
      node_ = child;
    }
  }

  __device__ int64_t wanted_at_node() {
    const RowLaw& law = state_.now.law;
    const bool cascade = is_cascade(args_.law.kind);
    read_target(node_, cascade);
    if (tree_.acceptance == TreeAcceptance::kSample) {
      if (cascade && (args_.law.cascade_bonus || has_usable_child(node_))) {
        read_draft(node_, true);
        by_one([&] { begin(args_.law, state_.mixing, state_.now); });
        if (state_.mixing.measure != Measure::kNothing)
          end_mixing<kClustered>(args_.law, state_.mixing, state_.now, state_.sums);
        by_one([&] { state_.now.set_cascade(); });
        return draw_from(state_.now, uniform(node_));
      }
      return law.one_hot ? law.argmax : draw_from(state_.now, uniform(node_));
    }
    if (args_.noise_keys == nullptr || law.one_hot) return law.argmax;
    return noisy_token<kClustered>(state_.now, state_.target.table, args_.noise_keys[state_.span.target_index + node_]);
  }

  __device__ int64_t typical() {
    for (int32_t node = int32_t(threadIdx.x); node < tree_.num_nodes; node += int32_t(blockDim.x)) {
      typical_.depth[node] = node == kRoot ? 0 : -1;
      typical_.likelihood[node] = 0.0f;
    }
    by_one([&] { state_.target.sampling = untruncated(state_.target.sampling); });
    int deepest = 0;
    float best = 0.0f;
    for (int32_t node = kRoot; node < tree_.num_nodes; ++node) {
      const int depth = typical_.depth[node];
      if (depth < 0) continue;
      if (depth > deepest || (depth == deepest && typical_.likelihood[node] > best)) {
        deepest = depth;
        best = typical_.likelihood[node];
        node_ = node;
      }
      if (!has_usable_child(node)) continue;
      read_target(node, false);
      const float least = typical_threshold(tree_.epsilon, tree_.delta, entropy());
      by_one([&] {
        for (int32_t child = first_child(node); child >= 0; child = next_sibling(child)) {
          if (!usable(child)) continue;
          const float p = prob_at(state_.now.row, state_.now.law, int32_t(token(child)));
          if (!(p > least)) continue;
          typical_.depth[child] = int8_t(depth + 1);
          typical_.likelihood[child] = typical_.likelihood[node] + logf(p);
        }
      });
    }
    if (is_eos_node(node_)) return Outcome::kNothing;
    by_one([&] { state_.target.sampling = sampling_of(args_.params, b_); });
    read_target(node_, false);
    return state_.now.law.one_hot ? state_.now.law.argmax : draw_from(state_.now, uniform(kRoot));
  }

  __device__ static Sampling untruncated(Sampling s) {
    s.top_k = 0;
    s.top_p = 1.0f;
    s.min_p = 0.0f;
    return s;
  }

  // Of the law of the row in hand, from which nothing was cut, in nats.
  __device__ float entropy() {
    const Remainder& now = state_.now;
    if (now.law.one_hot) return 0.0f;
    Group::sync();
    Group::for_each_tile(tiles(), [&](int tile) {
      float sum = 0.0f;
#pragma unroll 1
      for (int j = 0; j < kRuns; ++j) {
        float x[kRun];
        load_run(now.row, tile, j, x);
#pragma unroll
        for (int k = 0; k < kRun; ++k) {
          const float p = prob_of(x[k], now.law, held_id(tile, j * kRun + k));
          sum += p > 0 ? p * ((now.law.max - x[k]) * now.law.inverse_temperature) : 0.0f;
        }
      }
      sum = warp_reduce(sum, Sum{});
      if (lane_id() == 0) Group::store(state_.sums + tile, sum);
    });
    Group::sync();
    return logf(now.law.normalizer) + ordered_sum(state_.sums, tiles());
  }

  // Puts a node at a level, its rows not yet read.
  __device__ void enter(int level, int32_t node, float w) {
    by_one([&] {
      Level& at = levels_[level];
      at.node = node;
      at.w = w;
      at.read = false;
      at.laws.begin = at.laws.end = level > 0 ? levels_[level - 1].laws.end : 0;
    });
  }

  // Reads the rows of the node at a level, the draft's only if children are to be tried.
  __device__ void read(int level, bool with_draft) {
    Level& at = levels_[level];
    if (at.read) return;
    read_target(at.node, false);
    if (with_draft) read_draft(at.node, false);
    by_one([&] {
      at.read = true;
      at.laws.row = state_.now.row;
      at.laws.law = state_.now.law;
      at.laws.draft = state_.now.draft;
      at.laws.left = Siblings{};
      at.laws.changed = false;
      at.laws.removed = removed_;
    });
  }

  __device__ int64_t final_at(int level) {
    node_ = levels_[level].node;
    if (is_eos_node(node_)) return Outcome::kNothing;
    read(level, false);
    const SiblingLaws& laws = levels_[level].laws;
    return laws.certain() ? laws.law.argmax : draw_from(laws, uniform(kRoot));
  }

  __device__ int64_t recursive() {
    enter(0, kRoot, 1.0f);
    int32_t child = first_child(kRoot);
    while (child >= 0) {
      if (!usable(child)) {
        child = next_sibling(child);
        continue;
      }
      read(0, true);
      SiblingLaws& laws = levels_[0].laws;
      const int32_t x = int32_t(token(child));
      const float p = laws.prob(x), q = laws.draft_prob(x);
      if (!(q > 0)) {
        status_ |= kBadToken;
      } else if (accept_token(uniform(child), p, q)) {
        enter(0, child, 1.0f);
        child = first_child(child);
        continue;
      } else {
        reject<kClustered>(laws, x, 1.0f, state_.sums, state_.more_sums);
      }
      child = next_sibling(child);
    }
    return final_at(0);
  }

  // From the leaves up: a node whose children are all rejected is accepted with the weight that is left to it.
  __device__ int64_t traversal() {
    int level = 0;
    enter(0, kRoot, 1.0f);
    int32_t child = first_child(kRoot);
    for (;;) {
      Level& at = levels_[level];
      if (child >= 0) {
        if (usable(child)) {
          read(level, true);
          const int32_t x = int32_t(token(child));
          const float p = at.laws.prob(x), q = at.laws.draft_prob(x);
          if (q > 0 && level < kMostLevels - 1) {
            ++level;
            enter(level, child, next_block_weight(at.w, p, q));
            child = first_child(child);
            continue;
          }
          status_ |= kBadToken;
        }
        child = next_sibling(child);
        continue;
      }
      if (at.node == kRoot || uniform(at.node) < at.w) return final_at(level);
      const int32_t rejected = at.node;
      --level;
      Level& above = levels_[level];
      const float w = above.w,
                  left = reject<kClustered>(above.laws, int32_t(token(rejected)), w, state_.sums, state_.more_sums);
      by_one([&] { above.w = block_threshold(w, left); });
      child = next_sibling(rejected);
    }
  }

  // The outputs, by a block.
  __device__ void write(bool idle, int64_t final) {
    int64_t* tokens = args_.tokens + b_ * (tree_.max_depth + 1);
    int64_t* nodes = tree_.accepted_nodes + b_ * tree_.max_depth;
    for (int64_t i = threadIdx.x; i <= tree_.max_depth; i += blockDim.x) {
      tokens[i] = -1;
      if (i < tree_.max_depth) nodes[i] = -1;
    }
    by_one([&] {
      int64_t accepted = 0;
      for (int32_t node = node_; node > kRoot && accepted < tree_.max_depth; node = parent(node)) ++accepted;
      int32_t node = node_;
      for (int64_t d = accepted - 1; d >= 0; --d, node = parent(node)) nodes[d] = node, tokens[d] = token(node);
      if (final >= 0) tokens[accepted] = final;
      args_.num_accepted[b_] = int32_t(accepted);
      args_.num_tokens[b_] = idle ? 0 : int32_t(accepted + (final >= 0));
      args_.status[b_] = status_;
    });
  }

  const VerifyTreeArgs& tree_;
  const VerifyArgs& args_;
  State& state_;
  Level* const levels_;
  int32_t* const removed_;
  Typical& typical_;
  const int64_t b_;
  const int64_t *parents_, *first_child_, *next_sibling_;
  int32_t node_ = kRoot;  // the last accepted node
  int32_t status_;
};

// What a sequence's rows leave behind is in shared memory, after the list, or in device memory.
struct Place {
  bool listed;
  float* numbers;  // null: shared
  int64_t size;
};

template <bool kClustered>
__global__ void __launch_bounds__(kWalkThreads, 2)
    verify_tree_kernel(const __grid_constant__ VerifyTreeArgs args, const __grid_constant__ Place place) {
  SPECDEC_DYNAMIC_SHARED(shared);
  SPECDEC_SHARED(State, state, 1);
  SPECDEC_SHARED(Level, levels, kMostLevels);
  SPECDEC_SHARED(int32_t, removed, kMostNodes);
  SPECDEC_SHARED(Typical, typical, 1);
  float* const list = reinterpret_cast<float*>(shared);
  const int64_t b = blockIdx.x / Team<kClustered>::size();
  float* const numbers = place.numbers ? place.numbers + b * place.size : list + (place.listed ? kMaxListed : 0);
  TreeWalk<kClustered>(args, b, state[0], levels, removed, typical[0], list, numbers).run();
}

}  // namespace

cudaError_t verify_tree(const VerifyTreeArgs& args, const Launch& launch) {
  if (args.batch == 0) return cudaSuccess;
  const int tiles = (args.target.vocab + kTile - 1) / kTile;
  Place place{may_cut(args.params) || may_cut(args.draft_params), nullptr, numbers_of(args)};
  size_t shared = place.listed ? kMaxListed * sizeof(float) : 0;
  const bool fits = place.size <= int64_t(kMostSharedTiles) * 2 * (TileTable::kNumbers + 1);
  if (fits)
    shared += size_t(place.size) * sizeof(float);
  else
    place.numbers = static_cast<float*>(launch.scratch(args.batch * place.size * int64_t(sizeof(float))));
  // A sequence has its rows to itself: the fewer sequences, the more blocks share each row.
  unsigned cluster = 1;
  const Strategy forced = forced_strategy();
  while (forced == Strategy::kAuto && cluster < kMaxCluster && int64_t(cluster) * 2 * kWalkThreads / 32 <= tiles &&
         args.batch * cluster * 2 <= multiprocessors())
    cluster *= 2;
  if (forced == Strategy::kCluster) cluster = 2;
  if (!hopper_code() || !fits) cluster = 1;
  const Shape shape{dim3(unsigned(args.batch) * cluster), dim3(threads_for(tiles, kWalkThreads)), shared, cluster};
  return launch_kernel(cluster > 1 ? verify_tree_kernel<true> : verify_tree_kernel<false>, shape, launch.stream, args,
                       place);
}

}  // namespace specdec::cuda
