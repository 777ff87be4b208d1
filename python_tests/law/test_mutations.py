"""Every defect that the law checks exist for, planted: the named check must fail on the mutant and pass on the true op.

A mutant is a wrapper round the op's inputs, or the reference with one function replaced, reached by name so that it
does not matter which backends are present.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

import specdec_kernels as sk
from python_tests.law.cases import FOUND, check_law, check_zero_probability, given_bonus, problem
from python_tests.law.mutants import (
    coins_of_the_node_before,
    final_shares_the_first_coin,
    one_number_for_all,
    siblings_share_a_coin,
    uniforms,
)
from python_tests.law.steps import CASES, check_steps
from specdec_kernels.testing import Verify

reference = importlib.import_module("specdec_kernels.backends.reference.verify_chain")
token_rule, block_rule, true_remainder = reference.token_rule, reference.block_rule, reference.remainder_after
Check = Callable[[Verify], None]
TRUE: Verify = partial(sk.verify_chain, backend="reference")


def law(kind: str, acceptance: str = "token", vocab: int = 3, num_draft: int = 2) -> Check:
    return lambda verify: check_law(verify, problem(kind, vocab, num_draft), acceptance)


def steps(name: str) -> Check:
    return lambda verify: check_steps(verify, CASES[name])


# --- mutants that need only the inputs --------------------------------------------------------------------------------


def no_coins(u: torch.Tensor) -> torch.Tensor:
    """r = 1: accept iff P >= Q."""
    return torch.cat([u[:, :1], torch.full_like(u[:, 1:], 1 - 2.0**-24)], 1)


def wrong_draft_temperature(*args: Any, draft_params: sk.SamplingParams, **rest: Any) -> sk.VerifyOutput:
    return TRUE(*args, draft_params=replace(draft_params, temperature=1.0), **rest)


def draft_truncation_forgotten(*args: Any, draft_params: sk.SamplingParams, **rest: Any) -> sk.VerifyOutput:
    return TRUE(*args, draft_params=sk.SamplingParams(draft_params.temperature), **rest)


def target_params_forgotten(*args: Any, params: sk.SamplingParams, **rest: Any) -> sk.VerifyOutput:
    return TRUE(*args, **rest)


def id_0_dropped(target: torch.Tensor, tokens: torch.Tensor, *args: Any, **rest: Any) -> sk.VerifyOutput:
    return TRUE(target, tokens.masked_fill(tokens == 0, -1), *args, **rest)


def pad_read_as_token_0(target: torch.Tensor, tokens: torch.Tensor, *args: Any, **rest: Any) -> sk.VerifyOutput:
    return TRUE(target.nan_to_num(0.0), tokens.clamp_min(0), *args, **rest)


def discarding_after_a_look(*args: Any, **rest: Any) -> sk.VerifyOutput:
    """A stopping rule that drops the last accepted token when it does not like it (id 1)."""
    out = TRUE(*args, **rest)
    dislike = (out.tokens[:, 0] == 1) & (out.num_accepted >= 1)
    tokens = out.tokens.clone()
    fresh = TRUE(args[0], torch.full_like(args[1], -1), uniform_samples=rest["uniform_samples"], params=rest["params"])
    tokens[dislike] = fresh.tokens[dislike]
    return out._replace(tokens=tokens, num_tokens=(tokens >= 0).sum(1).int())


INPUT_MUTANTS = [
    # defect, mutant, the check that must catch it
    ("shared uniform", uniforms(TRUE, final_shares_the_first_coin), law("full")),
    ("shared uniform, block", uniforms(TRUE, final_shares_the_first_coin), law("full", "block", vocab=5)),
    ("shared uniform, one-hot", uniforms(TRUE, final_shares_the_first_coin), law("one_hot")),
    ("constant uniform", uniforms(TRUE, siblings_share_a_coin), law("full")),
    ("constant uniform, block", uniforms(TRUE, siblings_share_a_coin), law("full", "block", vocab=5)),
    ("one uniform for everything", uniforms(TRUE, one_number_for_all), law("full")),
    ("accept iff P >= Q", uniforms(TRUE, no_coins), law("full")),
    ("coins shifted by a column", uniforms(TRUE, coins_of_the_node_before), law("full")),
    ("draft law at the wrong temperature", wrong_draft_temperature, law("two_temperatures")),
    ("draft law at the wrong temperature, block", wrong_draft_temperature, law("two_temperatures", "block")),
    ("draft truncation forgotten", draft_truncation_forgotten, law("both_truncated", vocab=5)),
    ("target parameters forgotten", target_params_forgotten, law("target_top_p")),
    ("id 0 dropped", id_0_dropped, law("full")),
    ("id 0 dropped, block", id_0_dropped, law("full", "block", vocab=5)),
    ("pad read as token 0", pad_read_as_token_0, law("placeholder")),
    ("pad read as token 0, block", pad_read_as_token_0, law("placeholder", "block")),
    ("discarding after a look", discarding_after_a_look, law("full")),
    ("shared uniform over steps", uniforms(TRUE, final_shares_the_first_coin), steps("token-full")),
    ("constant uniform over steps", uniforms(TRUE, siblings_share_a_coin), steps("token-full")),
    ("draft law at the wrong temperature over steps", wrong_draft_temperature, steps("token-truncated")),
]


@pytest.mark.short(cases=5)
@pytest.mark.parametrize(("mutant", "check"), [m[1:] for m in INPUT_MUTANTS], ids=[m[0] for m in INPUT_MUTANTS])
def test_planted_input_defect_is_caught(mutant: Verify, check: Check) -> None:
    check(TRUE)
    with pytest.raises(AssertionError, match=FOUND):
        check(mutant)


# --- mutants of the rule itself: the reference with one function replaced ---------------------------------------------


def not_strict(chain: Any) -> Any:
    """`u · Q <= P`."""
    return reference.accept_while(chain.uniforms[:, 1:] * chain.q <= chain.p, chain)


def rejects_undrawable(chain: Any) -> Any:
    """In the place of a token that Q cannot have given one from (P − Q)+."""
    return token_rule(chain)._replace(length=chain.span.length)


def mass_not_compared(chain: Any) -> Any:
    """Accept with probability P, as if Q were 1."""
    return token_rule(replace(chain, q=torch.ones_like(chain.q)))


def final_with(left: Callable[[Any, Any, Any, Any], torch.Tensor]) -> Callable[..., Any]:
    """The final token drawn from ``left(P, Q, normalizer, w)`` after a rejection."""

    def remainder_after(chain: Any, walk: Any) -> Any:
        rest = true_remainder(chain, walk)
        q, normalizer = reference.at(chain.Q, walk.accepted), reference.at(chain.target.normalizer, walk.accepted)
        weights = left(chain.target.at(walk.accepted).weights, q, normalizer[:, None], walk.weight[:, None])
        use = (walk.accepted < chain.span.length) & (weights.sum(-1) > 0)
        return rest._replace(
            weights=torch.where(use[:, None], weights, chain.target.at(walk.accepted).weights),
            certain=torch.zeros_like(use),
        )

    return remainder_after


def unnormalised(p: torch.Tensor, q: torch.Tensor, normalizer: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Weights exp(logit − max) instead of probabilities: P times its normaliser, against Q."""
    return (p * normalizer - q).clamp_min(0)


RULE_MUTANTS: list[tuple[str, str, Any, Check]] = [
    ("<= instead of <", "token_rule", not_strict, check_zero_probability),
    ("residual without normalising weights", "remainder_after", final_with(unnormalised), law("full")),
    (
        "residual without normalising weights, block",
        "remainder_after",
        final_with(unnormalised),
        law("full", "block", vocab=5),
    ),
    ("recovered from P", "remainder_after", final_with(lambda p, q, v, w: p), law("full")),
    ("residual of Q − P", "remainder_after", final_with(lambda p, q, v, w: (q - p).clamp_min(0)), law("full")),
    ("residual |P − Q|", "remainder_after", final_with(lambda p, q, v, w: (q - p).abs()), law("full")),
    (
        "block residual without its weight",
        "remainder_after",
        final_with(lambda p, q, v, w: (p - q).clamp_min(0)),
        law("full", "block", vocab=5),
    ),
    ("one-hot residual keeps the rejected token", "remainder_after", final_with(lambda p, q, v, w: p), law("one_hot")),
    *(
        (f"what Q cannot give is accepted, {rule}", "can_give", lambda q: q >= 0, law("undrawable", rule))
        for rule in ("token", "block")
    ),
    ("what Q cannot give is rejected", "token_rule", rejects_undrawable, law("undrawable")),
    (
        "a given bonus token after a rejection",
        "whole_with_bonus",
        lambda span, accepted: span.takes_bonus,
        lambda verify: law("full")(given_bonus(verify)),
    ),
    ("a one-hot rule for a drawn draft", "token_rule", mass_not_compared, law("full")),
]


@pytest.mark.short(cases=6)
@pytest.mark.parametrize(("name", "mutant", "check"), [m[1:] for m in RULE_MUTANTS], ids=[m[0] for m in RULE_MUTANTS])
def test_planted_rule_defect_is_caught(name: str, mutant: Any, check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    check(TRUE)
    monkeypatch.setattr(reference, name, mutant)
    with pytest.raises(AssertionError, match=FOUND):
        check(TRUE)


def test_first_success_instead_of_last_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The block rule stopped at its first failure is not lossless."""

    def stops(chain: Any) -> Any:
        whole = block_rule(chain)
        for i in range(1, chain.tokens.shape[1] + 1):  # a prefix that fails is final
            prefix = chain.uniforms.clone()
            prefix[:, i + 1 :] = 1 - 2.0**-24
            shorter = block_rule(replace(chain, uniforms=prefix))
            whole = shorter.where((shorter.accepted < i) & (whole.accepted > shorter.accepted), whole)
        return whole

    law("full", "block", vocab=5)(TRUE)
    monkeypatch.setattr(reference, "block_rule", stops)
    with pytest.raises(AssertionError, match=FOUND):
        law("full", "block", vocab=5)(TRUE)


def test_block_noise_keyed_by_position_only_is_caught() -> None:
    """Uniforms and draft noise re-used at a position by later steps: biased with a full-support draft."""
    case = CASES["block-peaked"]
    check_steps(TRUE, case)
    with pytest.raises(AssertionError, match=FOUND):
        check_steps(TRUE, replace(case, keyed_by_position=True))


def test_accept_stream_shared_with_the_draft_is_caught() -> None:
    case = CASES["token-full"]
    with pytest.raises(AssertionError, match=FOUND):
        check_steps(TRUE, replace(case, accept_purpose="draft"))
