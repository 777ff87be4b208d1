"""`generate` with a target law: against a plain loop at temperature 0, and the identities of arXiv 2405.19261."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import specdec_kernels as sk
from python_tests.decoding.models import TableRunner, full_law, prompts, unlike_pair
from specdec_kernels import laws
from specdec_kernels.decoding import Provenance

GREEDY = sk.SamplingParams(temperature=0.0)
FAMILIES = ("llama", "t5")
LENGTHS = (3, 1, 6)
IDS, MASK = prompts(*LENGTHS)
K, LONGEST = 3, 12

Deferral = Callable[[Tensor, Tensor, int, float], bool]
"""Whether the target's likeliest token stands in for the draft's, given p, q, that token and α."""


def entropy(law: Tensor) -> Tensor:
    return -(law * law.log()).sum()


# name: law, its α for Llama and for T5 such that it defers at some places, when it defers at temperature 0
LAWS: dict[str, tuple[Callable[..., Any], tuple[float, float], Deferral]] = {
    "Lossy": (laws.Lossy, (0.3, 0.3), lambda p, q, x, a: True),
    "Lossy-exact": (functools.partial(laws.Lossy, beta="exact"), (0.3, 0.3), lambda p, q, x, a: True),
    "Chow": (laws.Chow, (0.75, 0.35), lambda p, q, x, a: bool(q.max() < 1 - a)),
    "Chow-log": (functools.partial(laws.Chow, loss="log"), (2.8, 1.0), lambda p, q, x, a: bool(entropy(q) > a)),
    "Diff": (laws.Diff, (0.03, 0.1), lambda p, q, x, a: bool(q.max() < p.max() - a)),
    "Diff-log": (
        functools.partial(laws.Diff, loss="log"), (0.1, 0.1), lambda p, q, x, a: bool(entropy(q) > entropy(p) + a)
    ),
    "TokenV1": (laws.TokenV1, (0.02, 0.1), lambda p, q, x, a: bool(q[x] < p.max() - a)),
    "TokenV2": (laws.TokenV2, (0.18, 0.25), lambda p, q, x, a: bool(p[x] < p.max() - a)),
    "TokenV3": (laws.TokenV3, (0.8, 0.7), lambda p, q, x, a: bool(p[x] < (1 - a) * p.max())),  # lemma 7
    "BiLD": (laws.BiLD, (3.9, 2.6), lambda p, q, x, a: bool(-(q * p.log()).sum() > a)),
    "BiLD-argmax": (
        functools.partial(laws.BiLD, distance="argmax"), (3.0, 2.2), lambda p, q, x, a: bool(-p[x].log() > a)
    ),
}  # fmt: skip
# lemma 10: the distance that α is multiplied with is 1 where the argmaxes differ, and elsewhere both write the same
LAWS["Opt"] = (laws.Opt, *LAWS["Diff"][1:])
LAWS["Opt-log"] = (functools.partial(laws.Opt, loss="log"), *LAWS["Diff-log"][1:])


@functools.cache
def models(family: str) -> tuple[Any, Any]:
    return unlike_pair(family)


@functools.cache
def next_laws(family: str, row: int, text: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The target's and the draft's own law of the token after `text`."""
    prompt = IDS[row, -LENGTHS[row] :]
    p, q = (full_law(model, prompt, list(text))[-1] for model in models(family))
    return p, q


def slow_loop(
    family: str, row: int, defers: Deferral, alpha: float, cascade_bonus: bool, ends: list[int]
) -> tuple[list[int], list[int]]:
    """Tokens and where they come from: greedy models, drafts of K tokens."""
    text: list[int] = []
    origin: list[int] = []
    while len(text) < LONGEST and not set(text) & set(ends):
        length = min(K, LONGEST - len(text) - 1)
        for i in range(length + 1):
            p, q = next_laws(family, row, tuple(text))
            drafted = int(q.argmax())
            wanted = int(p.argmax()) if defers(p, q, drafted, alpha) else drafted
            if i == length:
                text.append(wanted if cascade_bonus else int(p.argmax()))
                origin.append(int(Provenance.BONUS))
                break
            text.append(wanted)
            origin.append(int(Provenance.ACCEPTED if wanted == drafted else Provenance.RECOVERED))
            if wanted != drafted or wanted in ends:
                break
    return text, origin


def run(family: str, **kw: Any) -> Any:
    target, draft = models(family)
    kw = {"sampling": GREEDY, "num_speculative_tokens": K, "max_new_tokens": LONGEST, "eos_token_id": [], **kw}
    return sk.generate(target, IDS, attention_mask=MASK, drafter=sk.ModelDrafter(draft), **kw)


@pytest.mark.short(cases=10)
@pytest.mark.parametrize(
    ("name", "bonus"),
    [(name, bonus) for name in LAWS for bonus in ("target", "cascade") if (name[:5], bonus) != ("Lossy", "cascade")],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_temperature_0_equals_the_plain_loop(family: str, name: str, bonus: str) -> None:
    make, alphas, defers = LAWS[name]
    alpha = alphas[FAMILIES.index(family)]
    law = make(alpha)
    if bonus == "cascade":
        law = replace(law, bonus=bonus)
    lossless = run(family)
    total = torch.zeros(3, dtype=torch.int64)
    for ends in ([], [13, 21, 24]):
        out = run(family, target_law=law, eos_token_id=ends)
        for row in range(len(LENGTHS)):
            tokens, origin = slow_loop(family, row, defers, alpha, bonus == "cascade", ends)
            n = len(tokens)
            assert out.tokens[row].tolist() == tokens + [-1] * (out.tokens.shape[1] - n)
            assert out.provenance[row, :n].tolist() == origin
        kinds = out.provenance[out.tokens >= 0].bincount(minlength=3)
        total += kinds
        assert [out.stats.num_accepted, out.stats.num_rejected] == kinds[:2].tolist() and not out.status.any()
        if not ends:
            assert torch.equal(out.tokens, lossless.tokens) == isinstance(law, laws.Lossy)
    assert bool((total > 0).all())
    sampled = run(family, target_law=law, sampling=sk.SamplingParams(0.9, top_p=0.9), seeds=torch.arange(3))
    assert not sampled.status.any() and 0 < sampled.stats.num_accepted < sampled.stats.num_drafted


@pytest.mark.parametrize("acceptance", ["token", "block"])
@pytest.mark.parametrize("family", FAMILIES)
def test_always_deferring_is_speculative_decoding(family: str, acceptance: str) -> None:
    for sampling in (GREEDY, sk.SamplingParams(), sk.SamplingParams(0.7, top_p=0.9)):
        kw = {"sampling": sampling, "acceptance": acceptance, "seeds": torch.arange(3)}
        lossless = run(family, **kw)
        for bonus in ("target", "cascade"):
            out = run(family, target_law=laws.Chow(-1.0, bonus=bonus), **kw)
            assert torch.equal(out.tokens, lossless.tokens) and torch.equal(out.provenance, lossless.provenance)


@pytest.mark.parametrize("acceptance", ["token", "block"])
@pytest.mark.parametrize("family", FAMILIES)
def test_never_deferring_is_the_drafts_own_decoding(family: str, acceptance: str) -> None:
    plain = sk.generate(
        models(family)[1], IDS, attention_mask=MASK, drafter=sk.NoDrafter(), sampling=GREEDY, max_new_tokens=LONGEST,
        eos_token_id=[],
    )  # fmt: skip
    out = run(family, target_law=laws.Chow(2.0, bonus="cascade"), acceptance=acceptance)
    assert torch.equal(out.sequences, plain.sequences) and out.stats.num_rejected == 0


@pytest.mark.parametrize("acceptance", ["token", "block"])
@pytest.mark.parametrize(
    "law", [laws.Opt(0.2), laws.Opt(0.2, bonus="cascade"), laws.TokenV3(0.6, bonus="cascade"), laws.Lossy(0.4, "exact")]
)
def test_a_sequence_does_not_depend_on_its_batch(law: laws.TargetLaw, acceptance: str) -> None:
    target, draft = TableRunner.random(seed=1), TableRunner.random(seed=2)
    ids, mask = prompts(1, 5, 3, 8, 2, vocab=23)
    seeds = torch.tensor([5, -1, 2**62, 0, 77])
    kw: dict[str, Any] = {
        "drafter": sk.ModelDrafter(draft), "sampling": sk.SamplingParams(0.9, top_k=15), "max_new_tokens": 24,
        "num_speculative_tokens": K, "eos_token_id": [2, 3], "target_law": law, "acceptance": acceptance,
    }  # fmt: skip
    out = sk.generate(target, ids, attention_mask=mask, seeds=seeds, **kw)
    assert 0 < out.stats.num_accepted < out.stats.num_drafted and len(set(out.num_tokens.tolist())) > 2
    for row in range(5):
        alone = sk.generate(target, ids[row : row + 1, mask[row] > 0], seeds=seeds[row : row + 1], **kw)
        n = int(alone.num_tokens)
        assert n == out.num_tokens[row] and torch.equal(alone.tokens[0], out.tokens[row, :n])
