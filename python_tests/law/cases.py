"""The cases of the law tests: every draft kind × size, small enough to enumerate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

import specdec_kernels as sk
from python_tests.support import Backend
from specdec_kernels.laws import TargetLaw
from specdec_kernels.testing import ChainProblem, TreeProblem, Verify, exact_law, target_joint, total_variation

TOLERANCE = 2e-6  # total variation; the contract asks for 1e-4 in the largest entry
SIZES = ((3, 3), (5, 2), (8, 1), (2, 3))  # (vocab, num_draft)
# In their place where kernels are interpreted: a fourteenth of the calls, and still drafts of two tokens.
SMALLER = {(3, 3): (2, 2), (5, 2): (3, 1), (8, 1): (4, 1), (2, 3): (2, 1)}
Builder = Callable[[int, int, torch.Generator], ChainProblem]
KINDS: dict[str, Builder] = {}
# What checks say of a wrong distribution, and no other assertion on the way to one.
FOUND = "law off by|TV about|of probability 0|within a piece of the uniforms"


def kind(build: Builder) -> Builder:
    KINDS[build.__name__] = build
    return build


def problem(name: str, vocab: int, num_draft: int) -> ChainProblem:
    seed = 1000 * list(KINDS).index(name) + 10 * vocab + num_draft
    return KINDS[name](vocab, num_draft, torch.Generator().manual_seed(seed))


def with_law(kind: str, law: TargetLaw, vocab: int, num_draft: int) -> ChainProblem:
    """A problem under a law; for a cascade's bonus with a draft row more."""
    case = problem(kind, vocab, num_draft)
    assert case.draft is not None
    if law.cascade_bonus:
        columns = case.draft[-1].shape[-1]
        rng = torch.Generator().manual_seed(17)
        case.draft.append(torch.randn(*[vocab] * num_draft, columns, generator=rng).to(case.draft[-1].dtype))
    return replace(case, law=law)


def size_on(backend: Backend, kind: str, size: tuple[int, int]) -> tuple[int, int]:
    """The size to run a case in: `size`, or a smaller one where kernels are interpreted; Triton's interpreter, which
    is far slower, runs the smallest size of the plainest kind.
    """
    if backend.by_interpreter:
        if kind != "full":
            pytest.skip("Triton's interpreter needs minutes for this: it runs the smallest full problem alone")
        size = SIZES[-1]
    return SMALLER[size] if backend.interpreted else size


def check_law(verify: Verify, case: ChainProblem | TreeProblem, acceptance: str, device: str = "cpu") -> None:
    """The law that `verify` really produces is the target's."""
    distance = total_variation(exact_law(verify, case, acceptance, device), target_joint(case))
    assert distance < TOLERANCE, f"law off by TV {distance:.2e}"


def given_bonus(verify: Verify) -> Verify:
    """`verify` with its bonus tokens drawn before it, by its own uniforms, from the row behind each draft, which it
    does not get.
    """

    def call(target, tokens, *draft, uniform_samples, num_draft_tokens=None, **more):  # type: ignore[no-untyped-def]
        batch, num_draft = tokens.shape
        order = torch.arange(batch, device=tokens.device)
        lengths = torch.full_like(order, num_draft) if num_draft_tokens is None else num_draft_tokens.clamp_min(0)
        rows = target[order, lengths.long()]
        bonus = sk.sample(rows, more.get("params"), uniform_samples=uniform_samples[:, 0].contiguous()).token
        return verify(
            target[:, :-1], tokens, *draft, uniform_samples=uniform_samples, num_draft_tokens=num_draft_tokens,
            bonus_tokens=bonus, **more,
        )  # fmt: skip

    return call


def check_zero_probability(verify: Verify, device: str = "cpu") -> None:
    """A token of target probability 0 is never accepted, not even by a coin of 0: be it −inf or cut off."""
    target = torch.zeros(2, 3, 4)
    target[0, :, 1], target[1, :, 1] = -torch.inf, -5.0
    draft = torch.zeros(2, 2, 4)
    tokens, coins = torch.ones(2, 2, dtype=torch.int64), torch.zeros(2, 3)
    move = [target.to(device), tokens.to(device)]
    params = sk.SamplingParams(top_k=torch.tensor([0, 3]).to(device))
    for acceptance in ("token", "block"):
        for logits in (draft.to(device), None):
            out = verify(*move, logits, uniform_samples=coins.to(device), params=params, acceptance=acceptance)
            assert out.num_accepted.tolist() == [0, 0], f"{acceptance}: accepted a token of probability 0"
            assert (out.tokens[:, 0] != 1).all(), f"{acceptance}: emitted a token of probability 0"


def _rows(
    vocab: int, depths: int, rng: torch.Generator, *, columns: int | None = None, spread: float = 1.5
) -> list[Tensor]:
    return [torch.randn(*[vocab] * d, columns or vocab, generator=rng) * spread for d in range(depths)]


def _full(vocab: int, num_draft: int, rng: torch.Generator, **fields: object) -> ChainProblem:
    return ChainProblem(_rows(vocab, num_draft + 1, rng), _rows(vocab, num_draft, rng), **fields)  # type: ignore[arg-type]


@kind
def full(vocab: int, num_draft: int, rng: torch.Generator) -> ChainProblem:
    return _full(vocab, num_draft, rng)


@kind
def one_hot(vocab: int, num_draft: int, rng: torch.Generator) -> ChainProblem:
    return ChainProblem(_rows(vocab, num_draft + 1, rng), None)


@kind
def one_hot_truncated(vocab: int, num_draft: int, rng: torch.Generator) -> ChainProblem:
    return ChainProblem(_rows(vocab, num_draft + 1, rng), None, sk.SamplingParams(temperature=0.7, top_k=2, top_p=0.9))


@kind
def greedy_draft(vocab: int, num_draft: int, rng: torch.Generator) -> ChainProblem:
    return _full(vocab, num_draft, rng, draft_params=sk.SamplingParams(temperature=0.0))


@kind
def greedy_target(vocab: int, num_draft: int, rng: torch.Generator) -> ChainProblem:
    return _full(vocab, num_draft, rng, params=sk.SamplingParams(temperature=0.0))


@kind
def two_temperatures(vocab: int, num_draft: int, rng: torch.Generator) -> ChainProblem:
    return _full(vocab, num_draft, rng, params=sk.SamplingParams(0.6), draft_params=sk.SamplingParams(1.7))


@kind
def reduced_vocabulary(vocab: int, num_draft: int, rng: torch.Generator) -> ChainProblem:
    ids = torch.randperm(vocab, generator=rng)[: max(vocab - 2, 1)]
    draft = _rows(vocab, num_draft, rng, columns=max(len(ids), 2))
    if len(ids) == 1:  # two draft ids at least
        ids = torch.randperm(vocab, generator=rng)[:2]
    return ChainProblem(_rows(vocab, num_draft + 1, rng), draft, token_map=sk.TokenMap(ids))


@kind
def target_top_k(vocab: int, num_draft: int, rng: torch.Generator) -> ChainProblem:
    return _full(vocab, num_draft, rng, params=sk.SamplingParams(top_k=2))


@kind
def target_top_p(vocab: int, num_draft: int, rng: torch.Generator) -> ChainProblem:
    return _full(vocab, num_draft, rng, params=sk.SamplingParams(temperature=0.8, top_p=0.8))


@kind
def target_min_p(vocab: int, num_draft: int, rng: torch.Generator) -> ChainProblem:
    return _full(vocab, num_draft, rng, params=sk.SamplingParams(temperature=1.2, min_p=0.3))


@kind
def both_truncated(vocab: int, num_draft: int, rng: torch.Generator) -> ChainProblem:
    case = _full(vocab, num_draft, rng, params=sk.SamplingParams(0.9, top_k=max(vocab - 1, 2), top_p=0.95, min_p=0.02))
    case.draft_params = sk.SamplingParams(1.1, top_k=2, top_p=0.9, min_p_first=True, min_p=0.1)
    return case


@kind
def min_p_first(vocab: int, num_draft: int, rng: torch.Generator) -> ChainProblem:
    params = sk.SamplingParams(0.9, top_p=0.7, min_p=0.15, min_p_first=True)
    return _full(vocab, num_draft, rng, params=params, draft_params=params)


@kind
def zero_supports(vocab: int, num_draft: int, rng: torch.Generator) -> ChainProblem:
    """Ids that only the target, only the draft, or neither may draw; at some contexts the supports are disjoint."""
    case = _full(vocab, num_draft, rng)
    assert case.draft is not None
    for p, q in zip(case.target, case.draft, strict=False):
        hole = torch.rand(p.shape, generator=rng) < 0.4
        hole[..., 0] &= ~hole.all(-1)
        p[hole] = -torch.inf
        q[torch.rand(q.shape, generator=rng) < 0.4] = -torch.inf
        q[..., -1] = q[..., -1].clamp_min(-3.0)
    disjoint = torch.arange(vocab) < (vocab + 1) // 2
    case.target[0][~disjoint], case.draft[0][disjoint] = -torch.inf, -torch.inf
    case.target[0][0], case.draft[0][-1] = 0.3, 0.1
    return case


@kind
def equal_laws(vocab: int, num_draft: int, rng: torch.Generator) -> ChainProblem:
    target = _rows(vocab, num_draft + 1, rng)
    return ChainProblem(target, [t.clone() for t in target[:-1]])


@kind
def nearly_equal_laws(vocab: int, num_draft: int, rng: torch.Generator) -> ChainProblem:
    """Equal up to a constant, so that the residual is rounding alone."""
    target = _rows(vocab, num_draft + 1, rng)
    return ChainProblem(target, [t + 3.1 for t in target[:-1]])


@kind
def ties(vocab: int, num_draft: int, rng: torch.Generator) -> ChainProblem:
    """Few distinct logits: every truncation meets ties, and whole rows are flat."""
    case = _full(
        vocab, num_draft, rng, params=sk.SamplingParams(0.7, top_k=1), draft_params=sk.SamplingParams(top_p=0.5)
    )
    assert case.draft is not None
    case.target, case.draft = [t.round() for t in case.target], [t.round() for t in case.draft]
    case.target[0].fill_(1.0)
    return case


@kind
def nan_entries(vocab: int, num_draft: int, rng: torch.Generator) -> ChainProblem:
    case = _full(vocab, num_draft, rng)
    for rows in (*case.target, *(case.draft or [])):
        rows[torch.rand(rows.shape, generator=rng) < 0.2] = torch.nan
    return case


@kind
def nan_rows(vocab: int, num_draft: int, rng: torch.Generator) -> ChainProblem:
    """Whole rows of NaN or −inf: their law is all mass on id 0."""
    case = _full(vocab, num_draft, rng)
    assert case.draft is not None
    case.target[-1][..., 0, :] = torch.nan
    case.draft[0][:] = torch.nan
    if num_draft > 1:
        case.target[1][1] = -torch.inf
        case.draft[1][0] = -torch.inf
    return case


@kind
def infinite_logits(vocab: int, num_draft: int, rng: torch.Generator) -> ChainProblem:
    case = _full(vocab, num_draft, rng)
    assert case.draft is not None
    case.target[-1][..., 1, :].fill_(torch.inf)
    case.draft[0][1] = torch.inf
    return case


@kind
def placeholder(vocab: int, num_draft: int, rng: torch.Generator) -> ChainProblem:
    return _full(vocab, num_draft, rng, stop=num_draft - 1)


@kind
def placeholder_first(vocab: int, num_draft: int, rng: torch.Generator) -> ChainProblem:
    return _full(vocab, num_draft, rng, stop=0)


@kind
def id_outside_vocabulary(vocab: int, num_draft: int, rng: torch.Generator) -> ChainProblem:
    return _full(vocab, num_draft, rng, stop=num_draft - 1, stop_token=vocab)


@kind
def ragged(vocab: int, num_draft: int, rng: torch.Generator) -> ChainProblem:
    return _full(vocab, num_draft, rng, num_draft_tokens=max(num_draft - 1, 0))


@kind
def eos(vocab: int, num_draft: int, rng: torch.Generator) -> ChainProblem:
    return _full(vocab, num_draft, rng, eos=1)


@kind
def eos_one_hot(vocab: int, num_draft: int, rng: torch.Generator) -> ChainProblem:
    return ChainProblem(_rows(vocab, num_draft + 1, rng), None, eos=0)


@kind
def given_probabilities(vocab: int, num_draft: int, rng: torch.Generator) -> ChainProblem:
    case = _full(vocab, num_draft, rng, as_probs=True)
    assert case.draft is not None
    case.draft = [q.softmax(-1) for q in case.draft]
    case.draft[0][0] = 0.0
    case.draft[0] /= case.draft[0].sum()
    return case


@kind
def given_probabilities_reduced(vocab: int, num_draft: int, rng: torch.Generator) -> ChainProblem:
    case = reduced_vocabulary(vocab, num_draft, rng)
    assert case.draft is not None
    case.draft, case.as_probs = [q.softmax(-1) for q in case.draft], True
    return case


@dataclass
class Undrawable(ChainProblem):
    """Where the first token is 0, or of a draft of one token always, the last id is drafted next, although the draft's
    distribution there excludes it.
    """

    def draft_laws(self) -> list[np.ndarray]:
        """What tokens are really drawn from."""
        out = super().draft_laws()
        at = min(1, self.num_draft - 1)
        out[at][(0,) * at] = np.eye(self.vocab)[-1]
        return out


def _undrawable(vocab: int, num_draft: int, rng: torch.Generator, **fields: object) -> ChainProblem:
    case = Undrawable(_rows(vocab, num_draft + 1, rng), _rows(vocab, num_draft, rng), **fields)  # type: ignore[arg-type]
    assert case.draft is not None
    at = min(1, num_draft - 1)
    case.draft[at][(0,) * at][-1] = -torch.inf
    if case.as_probs:
        case.draft = [q.softmax(-1) for q in case.draft]
    return case


@kind
def undrawable(vocab: int, num_draft: int, rng: torch.Generator) -> ChainProblem:
    return _undrawable(vocab, num_draft, rng)


@kind
def undrawable_probabilities(vocab: int, num_draft: int, rng: torch.Generator) -> ChainProblem:
    return _undrawable(vocab, num_draft, rng, as_probs=True)


@kind
def no_distribution(vocab: int, num_draft: int, rng: torch.Generator) -> ChainProblem:
    """Probabilities of the last token sum to 1/2 where the first token is 0."""
    case = given_probabilities(vocab, num_draft, rng)
    assert case.draft is not None
    case.draft[-1][(0,) * min(1, num_draft - 1)] *= 0.5
    return case


@kind
def impossible_stats(vocab: int, num_draft: int, rng: torch.Generator) -> ChainProblem:
    def spoiled(rows: Tensor, params: sk.SamplingParams) -> sk.RowStats:
        stats = sk.row_stats(rows, params)
        stats.values[:, -1, 3] = torch.nan
        return stats

    return _full(vocab, num_draft, rng, draft_stats=spoiled)


@kind
def given_stats(vocab: int, num_draft: int, rng: torch.Generator) -> ChainProblem:
    params = sk.SamplingParams(0.8, top_k=max(vocab - 1, 2), top_p=0.85)
    return _full(vocab, num_draft, rng, draft_params=params, draft_stats=sk.row_stats)


@kind
def low_precision(vocab: int, num_draft: int, rng: torch.Generator) -> ChainProblem:
    case = _full(vocab, num_draft, rng, params=sk.SamplingParams(0.9, top_p=0.9))
    assert case.draft is not None
    case.target, case.draft = [t.bfloat16() for t in case.target], [q.half() for q in case.draft]
    return case


@kind
def peaked(vocab: int, num_draft: int, rng: torch.Generator) -> ChainProblem:
    """Large logits: most weights underflow, laws are nearly points."""
    return ChainProblem(_rows(vocab, num_draft + 1, rng, spread=60.0), _rows(vocab, num_draft, rng, spread=8.0))


def stratified(n: int, rng: np.random.Generator) -> np.ndarray:
    """`n` uniforms as float32, one from each n-th of [0, 1)."""
    return np.minimum((np.arange(n) + rng.random(n)) / n, 1 - 2.0**-24).astype(np.float32)
