#include "cases.h"

#include <algorithm>
#include <numeric>

#include "common/law.h"
#include "gather_case.h"
#include "shard_case.h"

namespace specdec::tests {
namespace {

// Tokens, some of them missing, from rows of which a few are not there.
Case logprobs_case(Random& random, bool large) {
  const int64_t batch = 1 + random.below(3), n = 1 + random.below(2), width = 1 + random.below(3);
  const int32_t vocab = make_vocab(random, large), num_top = random.pick({0, 1, 5, kMostTop});
  const auto rows = make_rows(random, make_values(random, batch * n, vocab), batch, n, vocab, make_dtype(random));
  const auto params = make_params(random, batch, vocab);
  std::vector<int64_t> tokens(batch * width), row_of(batch * width), num(batch);
  for (int64_t& token : tokens) token = random.below(vocab + 2) - 1;
  for (int64_t& row : row_of) row = random.below(n + 1);
  for (int64_t& count : num) count = random.below(width + 2);
  const bool of_rows = random.chance(0.7), some = random.chance(0.5);
  return {label("token_logprobs", batch, n, vocab, ""), [=](const Backend& backend) -> Outputs {
            const int64_t count = batch * width;
            Result<float> raw(count), processed(count), top_raw(count * num_top), top_processed(count * num_top);
            Result<int32_t> rank(count), status(count);
            Result<int64_t> top(count * num_top);
            backend.token_logprobs({rows->rows, batch, n, width, params->args, tokens.data(),
                                    of_rows ? row_of.data() : nullptr, Ids{some ? num.data() : nullptr, true}, num_top,
                                    raw.data(), processed.data(), rank.data(), status.data(), top.data(),
                                    top_raw.data(), top_processed.data()});
            return {rank.bytes() + status.bytes() + top.bytes(), raw.bytes() + top_raw.bytes(),
                    processed.bytes() + top_processed.bytes()};
          }};
}

Case row_case(Random& random, bool large) {
  const int64_t batch = 1 + random.below(3), n = 1 + random.below(2);
  const int32_t vocab = make_vocab(random, large);
  const auto rows = make_rows(random, make_values(random, batch * n, vocab), batch, n, vocab, make_dtype(random));
  const auto params = make_params(random, batch, vocab);
  const auto processors = make_processors(random, batch, batch * n, vocab);
  const double op = random.uniform();
  if (op < 0.3) {
    return {label("mask_logits", batch, n, vocab, ""), [=](const Backend& backend) -> Outputs {
              const RowBuffer before = *rows;
              Result<int32_t> status(batch * n);
              backend.mask_logits_({rows->rows, batch, n, params->args, status.data()});
              std::string masked(rows->bytes.begin(), rows->bytes.end());
              rows->bytes = before.bytes;  // in its place
              masked.resize((masked.size() + 3) / 4 * 4);
              return {status.bytes(), masked};
            }};
  }
  if (op < 0.65) {
    return {label("row_stats", batch, n, vocab, ""), [=](const Backend& backend) -> Outputs {
              StatsResult stats(batch * n);
              backend.row_stats({rows->rows, batch, n, params->args, stats.out(), processors->args});
              return {stats.argmax.bytes() + stats.status.bytes(), stats.values.bytes()};
            }};
  }
  return {label("warp_probs", batch, n, vocab, ""), [=](const Backend& backend) -> Outputs {
            Result<float> probs(batch * n * vocab);
            backend.warp_probs({rows->rows, batch, n, params->args, probs.data(), processors->args});
            return {"", probs.bytes()};
          }};
}

Case number_case(Random& random) {
  const int64_t batch = 1 + random.below(40), n = 1 + random.below(9), step = random.below(1000);
  const auto seeds = make_keys(random, batch);
  const auto steps = random.chance(0.5) ? make_keys(random, batch) : std::vector<int64_t>();
  const int64_t* no_steps = nullptr;
  if (random.chance(0.5)) {
    return {label("uniform_samples", batch, n, 0, ""), [=](const Backend& backend) -> Outputs {
              Result<double> out(batch * n);
              backend.uniform_samples(
                  {seeds.data(), steps.empty() ? no_steps : steps.data(), step, batch, n, 1, out.data()});
              return {out.bytes()};
            }};
  }
  std::vector<int32_t> positions(batch * n);
  for (int32_t& position : positions) position = int32_t(random.below(100000));
  return {label("noise_keys", batch, n, 0, ""), [=](const Backend& backend) -> Outputs {
            Result<int64_t> out(batch * n);
            backend.noise_keys({seeds.data(),
                                {positions.data(), false},
                                steps.empty() ? no_steps : steps.data(),
                                step,
                                batch,
                                n,
                                2,
                                out.data()});
            return {out.bytes()};
          }};
}

Case sample_case(Random& random, bool large) {
  const int64_t batch = 1 + random.below(3), n = 1 + random.below(2);
  const int32_t vocab = make_vocab(random, large);
  const auto rows = make_rows(random, make_values(random, batch * n, vocab), batch, n, vocab, make_dtype(random));
  const auto params = make_params(random, batch, vocab);
  const auto processors = make_processors(random, batch, batch * n, vocab);
  const int kind = int(random.below(4));  // uniforms, noise, several by noise, greedy
  const auto uniforms = kind == 0 ? make_uniforms(random, batch * n) : UniformBuffer();
  const auto keys = kind == 1 || kind == 2 ? make_keys(random, batch * n) : std::vector<int64_t>();
  const int32_t num_samples = kind == 2 ? 1 + int32_t(random.below(std::min(vocab, 5))) : 1;
  if (kind == 3) {
    params->args.temperature = 0.0f;
    params->args.temperatures = nullptr;
  }
  std::vector<int64_t> map;
  if (random.chance(0.3)) {
    for (int32_t v = 0; v < vocab; ++v) map.push_back(3 * v + 1);
  }
  std::vector<int32_t> row_of;  // some name no row
  for (int64_t b = random.chance(0.3) ? 0 : batch; b < batch; ++b)
    row_of.push_back(random.chance(0.1) ? random.pick({-1, int32_t(batch)}) : int32_t(random.below(batch)));
  auto source = rows;
  ProcessorArgs processed = processors->args;
  if (kind == 0 && map.empty() && random.chance(0.5)) {
    auto weights = make_values(random, batch * n, vocab);
    for (float& weight : weights) weight = std::fabs(weight);
    source = make_rows(random, weights, batch, n, vocab, DType::kFloat32);
    processed = {};
    params->args.rows = RowKind::kWeights;
    params->args.temperature = 1.0f;
    params->args.temperatures = nullptr;
  }
  return {label("sample", batch, n, vocab,
                " kind=" + std::to_string(kind) + " rows=" + std::to_string(int(params->args.rows)) +
                    (row_of.empty() ? "" : " indexed")),
          [=](const Backend& backend) -> Outputs {
            Result<int64_t> token(batch * n * num_samples);
            Result<float> log_prob(batch * n * num_samples);
            StatsResult stats(batch * n);
            backend.sample({source->rows,
                            batch,
                            n,
                            params->args,
                            uniforms.given(),
                            keys.empty() ? nullptr : keys.data(),
                            map.empty() ? nullptr : map.data(),
                            num_samples,
                            token.data(),
                            log_prob.data(),
                            stats.out(),
                            processed,
                            {{row_of.empty() ? nullptr : row_of.data(), false}, batch}});
            (void)processors;  // whose lists are read
            return {token.bytes() + stats.status.bytes(), log_prob.bytes(), stats.values.bytes(), stats.argmax.bytes()};
          },
          at_border(uniforms)};
}

// What a verify step reads besides the rows.
struct Step {
  std::vector<int32_t> draft_tokens, num_draft_tokens, bonus_tokens, cu;
  UniformBuffer uniforms;
  std::vector<float> draft_values;
  std::vector<int64_t> keys, seeds, steps, positions, eos, target_to_draft, draft_argmax;
  std::vector<int32_t> draft_status;
  std::shared_ptr<RowBuffer> target, draft;
  std::shared_ptr<ParamsBuffer> params, draft_params;
  std::shared_ptr<ProcessorsBuffer> processors;
  VerifyChainArgs args{};  // of a tree: what it shares with chains
  bool with_stats = false, with_overlap = false;
};

// The step's random numbers, or what it makes them from.
void make_numbers(Random& random, Step& step, int64_t batch, int64_t rows, bool match) {
  VerifyChainArgs& args = step.args;
  if (random.chance(0.3)) {
    step.seeds = make_keys(random, batch);
    if (random.chance(0.5)) step.steps = make_keys(random, batch);
    if (match) step.positions = make_keys(random, rows);
    args.coins = {step.seeds.data(),
                  step.steps.empty() ? nullptr : step.steps.data(),
                  random.below(1000),
                  {match ? step.positions.data() : nullptr, true}};
  } else if (match) {
    step.keys = make_keys(random, rows);
    args.noise_keys = step.keys.data();
  } else {
    step.uniforms = make_uniforms(random, rows);
    args.uniform_samples = step.uniforms.given();
  }
}

// The draft: the target's rows with noise, over the draft's ids; its tokens are likely ones, so that many are accepted.
void make_draft(Random& random, Step& step, const std::vector<float>& target, int64_t rows, int32_t vocab,
                const std::vector<int64_t>& target_row_of, int kind) {
  std::vector<int32_t> ids(vocab);
  std::iota(ids.begin(), ids.end(), 0);
  const bool mapped = kind != 0 && vocab > 3 && random.chance(0.3);
  if (mapped) {
    for (int32_t i = vocab - 1; i > 0; --i) std::swap(ids[i], ids[random.below(i + 1)]);
    ids.resize(vocab * 2 / 3);
    step.target_to_draft.assign(vocab, -1);
    for (size_t i = 0; i < ids.size(); ++i) step.target_to_draft[ids[i]] = int64_t(i);
  }
  const int32_t draft_vocab = int32_t(ids.size());
  std::vector<float> values(rows * draft_vocab);
  for (int64_t row = 0; row < rows; ++row) {
    float* x = values.data() + row * draft_vocab;
    const float* from = target.data() + target_row_of[row] * vocab;
    int32_t best = 0;
    float best_score = -std::numeric_limits<float>::infinity();
    for (int32_t i = 0; i < draft_vocab; ++i) {
      x[i] = from[ids[i]] + 0.5f * random.normal();
      const float score = x[i] + random.normal();
      if (score > best_score) best = i, best_score = score;
    }
    step.draft_tokens.push_back(random.chance(0.05) ? random.pick({-1, vocab, vocab + 7}) : ids[best]);
    if (kind == 2) {  // probabilities
      double sum = 0.0;
      for (int32_t i = 0; i < draft_vocab; ++i) {
        x[i] = std::isfinite(x[i]) ? std::exp(std::min(x[i], 20.0f)) : 0.0f;
        sum += x[i];
      }
      for (int32_t i = 0; i < draft_vocab; ++i) x[i] = sum > 0.0 ? float(x[i] / sum) : 1.0f / float(draft_vocab);
    }
  }
  if (kind == 0) return;
  step.draft = make_rows(random, values, 1, rows, draft_vocab, kind == 2 ? DType::kFloat32 : make_dtype(random));
  (kind == 2 ? step.args.draft_probs : step.args.draft) = step.draft->rows;
}

// A law that the rule takes; cascades need the draft's logits.
TargetLaw make_law(Random& random, Acceptance acceptance, bool logits) {
  TargetLaw law{LawKind::kLossless, false, 0.0f, 1.0f, 1.0f, false};
  if (acceptance == Acceptance::kMatch || acceptance == Acceptance::kGreedy || random.chance(0.4)) return law;
  law.kind = logits ? LawKind(1 + random.below(kNumLaws - 1)) : LawKind::kLossy;
  law.alpha = 0.8f * random.uniform();
  law.rest = 1.0f - law.alpha;
  law.variant = random.chance(0.5) || (law.kind == LawKind::kLossy && acceptance == Acceptance::kBlock);
  if (law.kind == LawKind::kLossy && !law.variant) law.beta = law.rest + random.uniform();
  law.cascade_bonus = is_cascade(law.kind) && random.chance(0.5);
  return law;
}

Case verify_case(Random& random, bool large) {
  auto step = std::make_shared<Step>();
  const int64_t batch = 1 + random.below(3), num_draft = random.below(4);
  const int32_t vocab = make_vocab(random, large);
  const bool packed = random.chance(0.4);
  VerifyChainArgs& args = step->args;

  const int kind = int(random.below(3));  // none, logits, probabilities
  args.acceptance = random.chance(0.5) ? random.pick({Acceptance::kToken, Acceptance::kBlock})
                                       : Acceptance(random.below(kNumAcceptances));
  args.law = make_law(random, args.acceptance, kind == 1);
  const int64_t bonus_rows = args.law.cascade_bonus ? 1 : 0;  // of each sequence's draft
  const bool given = bonus_rows == 0 && random.chance(0.3);   // the bonus tokens are

  // Row numbers of the draft and of the target: sequence by sequence in both layouts.
  std::vector<int64_t> target_row_of;
  step->cu.push_back(0);
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t drafted = packed ? random.below(num_draft + 1) : num_draft;
    for (int64_t i = 0; i < drafted + bonus_rows; ++i) target_row_of.push_back(step->cu.back() + (given ? 0 : b) + i);
    step->cu.push_back(step->cu.back() + int32_t(drafted));
  }
  const int64_t drafts = step->cu.back(), numbers = drafts + batch, draft_rows = drafts + bonus_rows * batch;
  const int64_t targets = given ? drafts : numbers;
  const auto values = make_values(random, targets, vocab);
  step->target =
      make_rows(random, values, packed ? 1 : batch, packed ? targets : targets / batch, vocab, make_dtype(random));
  args.target = step->target->rows;
  make_draft(random, *step, values, draft_rows, vocab, target_row_of, kind);
  if (bonus_rows > 0) {  // no token was drafted there
    for (int64_t b = batch; b > 0; --b) step->draft_tokens.erase(step->draft_tokens.begin() + step->cu[b] + b - 1);
  }
  if (args.law.kind == LawKind::kBiLD && !step->target_to_draft.empty()) args.law.variant = false;
  if (!packed) {
    for (Rows* rows : {&args.draft, &args.draft_probs})
      rows->stride_batch = (num_draft + bonus_rows) * rows->stride_row;
  }
  step->params = make_params(random, batch, vocab);
  step->draft_params = make_params(random, batch, vocab);
  step->processors = make_processors(random, batch, targets, vocab);
  if (args.acceptance != Acceptance::kGreedy)
    make_numbers(random, *step, batch, numbers, args.acceptance == Acceptance::kMatch);
  if (args.acceptance == Acceptance::kGreedy) {
    step->params->args.temperature = 0.0f;
    step->params->args.temperatures = nullptr;
  }
  if (!packed && random.chance(0.3)) {
    for (int64_t b = 0; b < batch; ++b) step->num_draft_tokens.push_back(int32_t(random.below(num_draft + 2)) - 1);
  }
  if (random.chance(0.3)) step->eos = {random.below(vocab), vocab - 1};
  for (int64_t b = 0; given && b < batch; ++b)
    step->bonus_tokens.push_back(random.chance(0.1) ? random.pick({-1, -2, vocab}) : int32_t(random.below(vocab)));
  step->with_stats = kind == 1 && random.chance(0.4);
  step->with_overlap = random.chance(0.2);

  args.draft_tokens = {step->draft_tokens.data(), false};
  args.cu = packed ? step->cu.data() : nullptr;
  args.batch = batch;
  args.num_draft = num_draft;
  args.total = drafts;
  args.target_to_draft = step->target_to_draft.empty() ? nullptr : step->target_to_draft.data();
  args.map_size = int64_t(step->target_to_draft.size());
  args.num_draft_tokens = {step->num_draft_tokens.empty() ? nullptr : step->num_draft_tokens.data(), false};
  args.bonus_tokens = {given ? step->bonus_tokens.data() : nullptr, false};
  args.eos_token_ids = step->eos.empty() ? nullptr : step->eos.data();
  args.num_eos = int64_t(step->eos.size());
  args.params = step->params->args;
  args.draft_params = step->draft_params->args;
  args.processors = step->processors->args;

  const std::string more = " acceptance=" + std::to_string(int(args.acceptance)) + " draft=" + std::to_string(kind) +
                           (given ? " bonus" : "") + " law=" + std::to_string(int(args.law.kind)) +
                           (packed ? " packed" : "") + (step->target_to_draft.empty() ? "" : " mapped") +
                           (step->with_stats ? " stats" : "");
  return {label("verify", batch, num_draft, vocab, more), [=](const Backend& backend) -> Outputs {
            VerifyChainArgs a = step->args;
            StatsResult stats(draft_rows);
            if (step->with_stats && draft_rows > 0) {
              // Parameters are per sequence: in the packed layout only scalars fit all rows as one batch.
              const SamplingArgs& p = a.draft_params;
              if (a.cu) a.draft_params = {p.temperature, p.top_k, p.top_p, p.min_p, p.min_p_first, {}, {}, {}, {}};
              backend.row_stats(
                  {a.draft, a.cu ? 1 : batch, a.cu ? draft_rows : num_draft + bonus_rows, a.draft_params, stats.out()});
              a.draft_values = stats.values.data();
              a.draft_argmax = stats.argmax.data();
              a.draft_status = stats.status.data();
            }
            Result<int64_t> tokens(batch * (num_draft + 1));
            Result<int32_t> accepted(batch), emitted(batch), status(batch);
            Result<float> overlap(step->with_overlap ? batch * num_draft : 0);
            a.tokens = tokens.data();
            a.num_accepted = accepted.data();
            a.num_tokens = emitted.data();
            a.status = status.data();
            a.overlap = step->with_overlap ? overlap.data() : nullptr;
            backend.verify_chain(a);
            return {tokens.bytes() + accepted.bytes() + emitted.bytes() + status.bytes(), overlap.bytes()};
          }};
}

// The links of a batch's trees, some of them to any node or to none.
struct Links {
  std::vector<int64_t> parents, first_child, next_sibling;
  int64_t max_depth = 0;
};

Links make_links(Random& random, int64_t trees, int64_t num_nodes, bool spoiled) {
  Links links;
  const int64_t all = trees * num_nodes;
  links.parents.assign(all, -1);
  links.first_child.assign(all, -1);
  links.next_sibling.assign(all, -1);
  for (int64_t t = 0; t < trees; ++t) {
    const int64_t at = t * num_nodes;
    std::vector<int64_t> depth(num_nodes), youngest(num_nodes, -1);
    for (int64_t node = 1; node < num_nodes; ++node) {
      const int64_t above = std::max<int64_t>(0, node - 1 - random.below(4));
      links.parents[at + node] = above;
      (youngest[above] < 0 ? links.first_child[at + above] : links.next_sibling[at + youngest[above]]) = node;
      youngest[above] = node;
      depth[node] = depth[above] + 1;
      links.max_depth = std::max(links.max_depth, depth[node]);
    }
  }
  if (!spoiled) return links;
  links.max_depth = num_nodes - 1;
  for (std::vector<int64_t>* of : {&links.parents, &links.first_child, &links.next_sibling}) {
    for (int64_t& to : *of)
      if (random.chance(0.2)) to = random.chance(0.5) ? random.below(num_nodes) : int64_t(random.bits());
  }
  return links;
}

Case tree_case(Random& random, bool large) {
  auto step = std::make_shared<Step>();
  const int64_t batch = 1 + random.below(3), num_nodes = random.pick({1, 2, 4, 7, 12}), rows = batch * num_nodes;
  const int32_t vocab = make_vocab(random, large);
  const auto acceptance = TreeAcceptance(random.below(kNumTreeAcceptances));
  const bool needs_draft = acceptance == TreeAcceptance::kRecursive || acceptance == TreeAcceptance::kTraversal;
  const int kind = needs_draft ? 1 + int(random.below(2)) : int(random.below(3));  // none, logits, probabilities
  const bool spoiled = random.chance(0.2), per_sequence = random.chance(0.7);
  auto links = std::make_shared<Links>(make_links(random, per_sequence ? batch : 1, num_nodes, spoiled));
  if (links->max_depth > 1 && random.chance(0.1)) --links->max_depth;  // the tree is deeper than declared

  VerifyArgs& args = step->args;
  args.law = {LawKind::kLossless, false, 0.0f, 1.0f, 1.0f, false};
  if (acceptance == TreeAcceptance::kSample && kind == 1 && random.chance(0.6)) {
    args.law.kind = LawKind(int(LawKind::kChow) + random.below(kNumLaws - int(LawKind::kChow)));
    args.law.alpha = 0.8f * random.uniform();
    args.law.rest = 1.0f - args.law.alpha;
    args.law.variant = random.chance(0.5);
    args.law.cascade_bonus = random.chance(0.5);
  }
  const auto values = make_values(random, rows, vocab);
  step->target = make_rows(random, values, batch, num_nodes, vocab, make_dtype(random));
  args.target = step->target->rows;
  std::vector<int64_t> same(rows);
  std::iota(same.begin(), same.end(), 0);
  make_draft(random, *step, values, rows, vocab, same, kind);
  for (Rows* of : {&args.draft, &args.draft_probs}) of->stride_batch = num_nodes * of->stride_row;
  if (args.law.kind == LawKind::kBiLD && !step->target_to_draft.empty()) args.law.variant = false;
  // First children are drawn after their parents, their siblings are any ids.
  auto tokens = std::make_shared<std::vector<int32_t>>(rows, 0);
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t at = b * num_nodes, link = per_sequence ? at : 0;
    if (random.chance(0.1)) (*tokens)[at] = -1;
    for (int64_t node = 1; node < num_nodes; ++node) {
      const int64_t above = links->parents[link + node];
      const bool first = above >= 0 && above < num_nodes && links->first_child[link + above] == node;
      (*tokens)[at + node] = first                 ? step->draft_tokens[at + above]
                             : random.chance(0.05) ? random.pick({-1, vocab})
                                                   : int32_t(random.below(vocab));
    }
  }
  step->params = make_params(random, batch, vocab);
  step->draft_params = make_params(random, batch, vocab);
  step->processors = make_processors(random, batch, rows, vocab);
  if (acceptance != TreeAcceptance::kGreedy)
    make_numbers(random, *step, batch, rows, acceptance == TreeAcceptance::kMatch);
  if (random.chance(0.3)) step->eos = {random.below(vocab), vocab - 1};
  step->with_stats = kind == 1 && random.chance(0.4);

  args.batch = batch;
  args.target_to_draft = step->target_to_draft.empty() ? nullptr : step->target_to_draft.data();
  args.map_size = int64_t(step->target_to_draft.size());
  args.eos_token_ids = step->eos.empty() ? nullptr : step->eos.data();
  args.num_eos = int64_t(step->eos.size());
  args.params = step->params->args;
  args.draft_params = step->draft_params->args;
  args.processors = step->processors->args;

  const std::string more = " acceptance=" + std::to_string(int(acceptance)) + " draft=" + std::to_string(kind) +
                           " law=" + std::to_string(int(args.law.kind)) + (spoiled ? " spoiled" : "");
  return {label("verify_tree", batch, num_nodes, vocab, more),
          [=](const Backend& backend) -> Outputs {
            StatsResult stats(rows);
            Result<int64_t> out(batch * (links->max_depth + 1)), nodes(batch * links->max_depth);
            Result<int32_t> accepted(batch), emitted(batch), status(batch);
            const std::vector<int32_t> tree_status(batch, 0);
            VerifyTreeArgs a{};
            static_cast<VerifyArgs&>(a) = step->args;
            if (step->with_stats) {
              backend.row_stats({a.draft, batch, num_nodes, a.draft_params, stats.out()});
              a.draft_values = stats.values.data();
              a.draft_argmax = stats.argmax.data();
              a.draft_status = stats.status.data();
            }
            a.tokens = out.data();
            a.num_accepted = accepted.data();
            a.num_tokens = emitted.data();
            a.status = status.data();
            a.node_tokens = {tokens->data(), false};
            a.parents = links->parents.data();
            a.first_child = links->first_child.data();
            a.next_sibling = links->next_sibling.data();
            a.tree_status = tree_status.data();
            a.tree_per_sequence = per_sequence;
            a.num_nodes = num_nodes;
            a.max_depth = links->max_depth;
            a.acceptance = acceptance;
            a.epsilon = 0.09f;
            a.delta = 0.3f;
            a.accepted_nodes = nodes.data();
            backend.verify_tree(a);
            return {out.bytes() + nodes.bytes() + accepted.bytes() + emitted.bytes() + status.bytes()};
          },
          at_border(step->uniforms)};
}

// Steps one after the other, of lists that begin with room for some of the coming tokens, or for none.
Case count_case(Random& random) {
  const int64_t batch = 1 + random.below(5), n = random.below(70);
  const int32_t capacity = int32_t(random.below(700)), most = random.pick({20, 3000});
  std::vector<int32_t> ids(size_t(batch * capacity), INT32_MAX), tokens(size_t(batch * n)), lengths;
  for (int64_t b = 0; b < batch; ++b)
    for (int32_t i = 0, id = int32_t(random.below(3)); i < capacity - 9 && id < most; ++i, id += 1 + random.below(9))
      ids[size_t(b * capacity + i)] = id;
  if (random.chance(0.2) && capacity > 20) std::swap(ids[3], ids[4]);
  for (int32_t& token : tokens) token = int32_t(random.below(most)) - 1;
  if (random.chance(0.5))
    for (int64_t b = 0; b < batch; ++b) lengths.push_back(int32_t(random.below(n + 3)) - 1);
  return {label("count_tokens", batch, n, capacity, ""), [=](const Backend& backend) -> Outputs {
            Result<int32_t> lists(batch * capacity), counts(batch * capacity), num_output(batch), status(batch);
            std::copy(ids.begin(), ids.end(), lists.data());
            std::fill_n(counts.data(), batch * capacity, 1);
            std::fill_n(num_output.data(), batch, 7);
            const Ids num_tokens{lengths.empty() ? nullptr : lengths.data(), false};
            for (int step = 0; step < 2; ++step)
              backend.count_tokens_({lists.data(),
                                     counts.data(),
                                     num_output.data(),
                                     batch,
                                     n,
                                     capacity,
                                     {tokens.data(), false},
                                     num_tokens,
                                     status.data()});
            return {lists.bytes() + counts.bytes() + num_output.bytes() + status.bytes()};
          }};
}

}  // namespace

Case make_case(uint64_t seed, bool large) {
  Random random(seed);
  const double kind = random.uniform();
  if (kind < 0.08) return row_case(random, large);
  if (kind < 0.1) return shard_case(random, large);
  if (kind < 0.15) return logprobs_case(random, large);
  if (kind < 0.25) return number_case(random);
  if (kind < 0.4) return sample_case(random, large);
  if (kind < 0.45) return gather_case(random);
  if (kind < 0.5) return count_case(random);
  if (kind < 0.7) return tree_case(random, large);
  return verify_case(random, large);
}

}  // namespace specdec::tests
