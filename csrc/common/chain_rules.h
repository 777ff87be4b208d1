// The acceptance rules for a chain of draft tokens, each written once, in terms of what a position can answer.
//
// A `Chain` is one sequence of one backend, currently at one position:
//
//   token(i)              the draft token of position i, x
//   read_target(i)        go to position i and read P; its flags count from here on
//   read_draft(i)         read Q too, and begin the law that the target law derives from both; Q's flags count
//   end_before(i)         end the span before x_i, which Q cannot have produced, and flag it
//   one_hot(), argmax()   whether all of P's mass is on one id, and which id
//   p(x), q(x), keeps(x)  P and Q of an id, and whether a cascade's law keeps it
//   accept()              the factor of P in the token rule (1 unless the target law says otherwise)
//   coin(i)               the coin of draft token x_i
//   enter(i, w)           read_target, read_draft, and find the residual there: (w law - Q)+
//   residual(i)           the mass of the residual: the sum of (w law - Q)+
//   next_weight(i, w)     w after x, or kImpossible: see weight_after
//   remember(i, w)        note the position as the one where a token may have to be recovered
//   wanted(i)             the token that the target itself draws there, for match and greedy
#pragma once
#include "common/span.h"

namespace specdec {

// ---- Token rule (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318) ----

// u * Q(x) < P(x), strictly, so that P = 0 is never accepted. Q(x) may exceed 1 by what can_give allows; without the
// clamp, a coin close to 1 could reject x although P(x) is 1 too.
SPECDEC_HD bool accept_token(double coin, float p, float q) { return coin * fminf(q, 1.0f) < p; }

// What becomes of a draft token.
enum class Verdict : int32_t { kAccepted, kRejected, kImpossible };

// The verdict on x_i. Neither a point mass nor a token that a cascade keeps needs a coin.
template <class Chain>
SPECDEC_RULE Verdict judge_by_token(const VerifyChainArgs& args, Chain& at, int64_t i) {
  const auto verdict = [](bool accepted) { return accepted ? Verdict::kAccepted : Verdict::kRejected; };
  const bool cascade = is_cascade(args.law.kind);
  at.read_target(i);
  const int32_t x = int32_t(at.token(i));
  if (at.one_hot() && !cascade) return verdict(x == at.argmax());
  at.read_draft(i);
  const float q = at.q(x);
  if (!can_give(q)) return Verdict::kImpossible;
  if (cascade && at.keeps(x)) return Verdict::kAccepted;
  const float p = at.accept() * at.p(x);
  return verdict(accept_token(at.coin(i), p, q));
}

// The number of draft tokens accepted: those before the first that is not. If that one is impossible, the span ends
// before it, and the next token is drawn from the law there, as after a span accepted whole.
template <class Chain>
SPECDEC_RULE int64_t token_rule(const VerifyChainArgs& args, Chain& chain, const Span& span) {
  for (int64_t i = 0; i < span.length; ++i) {
    const Verdict verdict = judge_by_token(args, chain, i);
    if (verdict == Verdict::kImpossible) chain.end_before(i);
    if (verdict != Verdict::kAccepted) return i;
  }
  return span.length;
}

// ---- Block rule (Sun et al., arXiv 2403.10444, algorithm 2) ----

// w_i from w_{i-1}, for a token that Q can have produced.
SPECDEC_HD float next_block_weight(float w, float p, float q) {
  return p > 0.0f && w > 0.0f ? fminf(1.0f, w * p / fminf(q, 1.0f)) : 0.0f;
}

// The acceptance threshold h_i given w_i and R_i = sum of the residual weights at the next position.
SPECDEC_HD float block_threshold(float w, float residual) {
  const float below = residual + 1.0f - w;
  return below > 0.0f ? residual / below : 1.0f;
}

constexpr float kImpossible = -1.0f;

// How x changes w at a position: the probabilities of x under the law and under Q; q is kImpossible if Q cannot give x.
struct Step {
  float p, q;
};

template <class Position>
SPECDEC_RULE Step step_at(const TargetLaw& law, const Position& at, int32_t x) {
  const float p = at.p(x), q = at.q(x);
  if (!can_give(q)) return {0.0f, kImpossible};
  const bool kept = is_cascade(law.kind) && at.keeps(x);
  return {law_at(law, at.mixture, p, q, kept), q};
}

SPECDEC_HD float weight_after(Step step, float w) {
  return step.q == kImpossible ? kImpossible : next_block_weight(w, step.p, step.q);
}

// w after x at a position, given w before it; kImpossible if Q cannot have produced x.
template <class Position>
SPECDEC_RULE float weight_after(const TargetLaw& law, const Position& at, int32_t x, float w) {
  return weight_after(step_at(law, at, x), w);
}

// Calls visit(i, w) at each position until w has become 0; the weights depend on no coin. The span ends before the
// first token that is impossible.
struct Walked {
  int64_t positions;
  float w;  // after the last of them
};

template <class Chain, class Visit>
SPECDEC_RULE Walked walk_weights(Chain& chain, const Span& span, Visit visit) {
  float w = 1.0f;
  int64_t i = 0;
  for (; i < span.length && w > 0; ++i) {
    chain.enter(i, w);
    const float next = chain.next_weight(i, w);
    if (next == kImpossible) {
      chain.end_before(i);
      break;
    }
    visit(i, w);
    w = next;
  }
  return {i, w};
}

// The number of draft tokens accepted. The last coin that succeeds counts, so the walk goes on after a failure.
template <class Chain>
SPECDEC_RULE int64_t block_rule(Chain& chain, const Span& span) {
  int64_t accepted = 0;
  const Walked end = walk_weights(chain, span, [&](int64_t i, float w) {
    if (i > 0 && !(chain.coin(i - 1) < block_threshold(w, chain.residual(i)))) return;
    accepted = i;
    chain.remember(i, w);
  });
  if (end.positions > 0 && chain.coin(end.positions - 1) < end.w) accepted = span.length;
  return accepted;
}

// ---- Match and greedy ----

// Whether x_i is accepted: it is what the target itself draws.
template <class Chain>
SPECDEC_RULE bool accepts_by_match(const Chain& at, int64_t i, int64_t wanted) {
  return at.token(i) == wanted;
}

// The number of draft tokens accepted, and what the target draws after them.
template <class Chain>
SPECDEC_RULE Outcome match_rule(Chain& chain, const Span& span) {
  for (int64_t i = 0; i < target_rows(span); ++i) {
    chain.read_target(i);
    const int64_t wanted = chain.wanted(i);
    if (i == span.length || !accepts_by_match(chain, i, wanted)) return {i, wanted};
  }
  return {span.length, Outcome::kNothing};
}

// ---- Which rule, and what follows the accepted tokens ----

SPECDEC_HD bool by_match(const VerifyChainArgs& args) {
  return args.acceptance == Acceptance::kMatch || args.acceptance == Acceptance::kGreedy;
}

// Whether sequence b uses the block rule. For a draft with a one-hot law the token rule is used instead: its output
// distribution is the same there, and it needs no draft.
SPECDEC_HD bool by_block(const VerifyChainArgs& args, int64_t b) {
  return args.acceptance == Acceptance::kBlock && has_draft(args) &&
         (args.draft_probs.data || !sampling_of(args.draft_params, b).greedy);
}

enum class Next : int32_t { kNothing, kBonus, kRecovered };

SPECDEC_HD Next next_after(const Span& span, int64_t accepted) {
  if (accepted < span.length) return Next::kRecovered;
  return span.closed ? Next::kNothing : Next::kBonus;
}

// The outcome of a sequence whose positions are visited one by one. final_token(next, accepted) draws its last token.
template <class Chain>
SPECDEC_RULE Outcome chain_rule(const VerifyChainArgs& args, const Span& span, int64_t b, Chain& chain) {
  if (span.idle) return {};
  if (by_match(args)) return match_rule(chain, span);
  const int64_t accepted = by_block(args, b) ? block_rule(chain, span) : token_rule(args, chain, span);
  return {accepted, chain.final_token(next_after(span, accepted), accepted)};
}

}  // namespace specdec
