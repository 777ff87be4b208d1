"""The law that each backend really produces with each of `sk.laws`, extracted through the uniforms, and the paper's
lemmas (Narasimhan et al., arXiv 2405.19261).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest
import torch

import specdec_kernels as sk
from python_tests.law.cases import SIZES, check_law, problem, size_on, with_law
from python_tests.ops import chains
from python_tests.ops.chains import LAWS, run
from python_tests.ops.inputs import logits, same_bits
from python_tests.support import Backend
from specdec_kernels import laws
from specdec_kernels.laws import TargetLaw
from specdec_kernels.testing import float64_law, float64_target_law

OP = "verify_chain"
EMULATED_CASES = 20
SIZE = (3, 2)  # (vocab, num_draft); smaller where kernels are interpreted
ROWS = ("both_truncated", "reduced_vocabulary", "zero_supports", "given_stats")
OTHERS = ("greedy_draft", "greedy_target", "infinite_logits", "nan_rows", "ragged", "eos", "placeholder_first", "ties")


def named(law: TargetLaw) -> str:
    fields = "-".join(str(v) for v in vars(law).values())
    return f"{type(law).__name__}-{fields}"


def each(some: Iterable[TargetLaw], kinds: Iterable[str] = ("full",)) -> pytest.MarkDecorator:
    """Parametrises `acceptance`, `kind` and `law` by what goes together."""
    cases = [
        pytest.param(acceptance, kind, law, id=f"{acceptance}-{kind}-{named(law)}")
        for acceptance in ("token", "block")
        for kind in kinds
        for law in some
        if chains.fits(law, acceptance, "reduced" if "reduced" in kind else "full")
    ]
    return pytest.mark.parametrize(("acceptance", "kind", "law"), cases)


def check(backend: Backend, acceptance: str, kind: str, law: TargetLaw) -> None:
    size = size_on(backend, kind, SIZES[-1]) if backend.interpreted else SIZE
    check_law(backend.verify_chain, with_law(kind, law, *size), acceptance, backend.device)


@pytest.mark.short(triton=0, emulated=4)
@each(LAWS)
def test_emitted_law_is_the_cascades(backend: Backend, acceptance: str, kind: str, law: TargetLaw) -> None:
    check(backend, acceptance, kind, law)


@pytest.mark.short(emulated=6)
@each(LAWS, ROWS)
def test_emitted_law_of_every_kind_of_row(backend: Backend, acceptance: str, kind: str, law: TargetLaw) -> None:
    check(backend, acceptance, kind, law)


@pytest.mark.short(emulated=5)
@each([laws.Lossy(0.4, beta="exact"), *LAWS[-6:-2]], OTHERS)
def test_emitted_law_of_odd_rows(backend: Backend, acceptance: str, kind: str, law: TargetLaw) -> None:
    check(backend, acceptance, kind, law)


@pytest.mark.parametrize("kind", ["one_hot", "given_probabilities"])
@pytest.mark.parametrize("law", LAWS[:3], ids=named)
def test_lossy_takes_drafts_without_logits(backend: Backend, kind: str, law: TargetLaw) -> None:
    """Where Q is one-hot or given: the law min(Q, P / (1 − α)) + (1 − A) norm((P / β − Q)+)."""
    case = problem(kind, *(size_on(backend, kind, SIZES[-1]) if backend.interpreted else SIZE))
    if kind == "one_hot":  # a law a path: the oracle needs Q, which is that path
        rows = [torch.full(t.shape, -torch.inf) for t in case.target[:-1]]
        for d, row in enumerate(rows):
            row[..., d % case.vocab] = 0.0
        case.draft = rows
        one_hot = replace(case, law=law)

        def verify(target, tokens, draft_logits, *, draft_params=None, **rest):  # type: ignore[no-untyped-def]
            return backend.verify_chain(target, tokens, **rest)

        check_law(verify, one_hot, "token", backend.device)
    else:
        check_law(backend.verify_chain, replace(case, law=law), "token", backend.device)


def accepted_share(backend: Backend, law: TargetLaw, target: torch.Tensor, draft: torch.Tensor) -> float:
    """The probability that a token drawn from Q is accepted, by bisection for each token's largest accepted coin."""
    vocab = target.shape[-1]
    low, high = torch.zeros(vocab), torch.full((vocab,), 1.0 + 2.0**-24)  # accepted below, rejected from here on
    rows = [t.expand(vocab, -1, -1) for t in (target, draft)]
    for _ in range(25):
        middle = (low + high) / 2
        coins = torch.stack([torch.full((vocab,), 0.5), middle.clamp_max(1 - 2.0**-24)], 1)
        out = backend.verify_chain(
            *backend(rows[0], torch.arange(vocab)[:, None], rows[1]), uniform_samples=backend(coins), target_law=law
        )
        taken = out.num_accepted.cpu() == 1
        low, high = torch.where(taken, middle, low), torch.where(taken, high, middle)
    return float((float64_law(draft)[0] * low.clamp_max(1.0).double().numpy()).sum())


@pytest.mark.short(emulated=5)
@pytest.mark.parametrize("law", [law for law in LAWS if not law.cascade_bonus], ids=named)
def test_rejection_rate_is_the_distance_between_draft_and_law(backend: Backend, law: TargetLaw) -> None:
    """Lemma 3: rejected with probability δ TV(P, Q), which is TV(π, Q); for Lossy 1 − A."""
    size_on(backend, "accepted share", SIZES[-1])
    rng = torch.Generator().manual_seed(11)
    target, draft = logits(rng, 2, 9), logits(rng, 1, 9)
    P, Q = float64_law(target)[:1], float64_law(draft)
    expected = float(np.minimum(float64_target_law(law, P, Q, P, Q), Q).sum())
    if isinstance(law, laws.Lossy):
        expected = float(np.minimum(Q, P / (1 - law.alpha)).sum())
    assert abs(accepted_share(backend, law, target, draft) - expected) < 1e-5


def chain(backend: Backend, **more: object) -> chains.Arguments:
    rng = torch.Generator().manual_seed(23)
    return chains.make(rng, backend.batch(32 if backend.interpreted else 400), 3, 17, **more)  # type: ignore[arg-type]


NEVER: list[TargetLaw] = [laws.Chow(2.0), laws.Diff(2.0), laws.Opt(90.0), laws.BiLD(1e6), laws.TokenV3(1.5)]
ALWAYS: list[TargetLaw] = [laws.Chow(-1.0), laws.Diff(-2.0), laws.Opt(-3.0), laws.BiLD(-1.0), laws.TokenV3(-0.5)]


@each([*ALWAYS, laws.Lossy(0.0)])
def test_always_deferring_is_plain_speculative_decoding(
    backend: Backend, acceptance: str, kind: str, law: TargetLaw
) -> None:
    """δ = 1 everywhere (r = 1, α = 0): the same tokens for the same uniforms."""
    given = chain(backend, kind=kind, acceptance=acceptance, params=sk.SamplingParams(0.8, top_p=0.9))
    same_bits(run(backend, given, target_law=law), run(backend, given))


@pytest.mark.short(emulated=3)
@each(NEVER)
def test_never_deferring_is_the_draft(backend: Backend, acceptance: str, kind: str, law: TargetLaw) -> None:
    """δ = 0 everywhere: nothing is rejected, and the cascade's bonus has the draft's law."""
    law = replace(law, bonus="cascade")  # type: ignore[call-arg]
    given = chain(backend, kind=kind, acceptance=acceptance, params=sk.SamplingParams(0.6, top_k=5), law=law)
    out = run(backend, given)
    assert (out.num_accepted == 3).all()
    alone = backend.sample(
        backend(given["draft_logits"][:, 3].contiguous()), given["draft_params"],
        uniform_samples=backend(given["uniform_samples"][:, 0].contiguous()),
    )  # fmt: skip
    assert torch.equal(out.tokens[:, 3], alone.token)
    if not backend.interpreted:
        check(backend, acceptance, kind, law)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.9])
def test_token_v3_at_temperature_0_is_lossy_greedy(backend: Backend, alpha: float) -> None:
    """Lemma 7: accept iff p(x) >= (1 − α) max p, else emit the argmax; without any uniform."""
    zero = sk.SamplingParams(0.0)
    given = chain(backend, params=zero, draft_params=zero)
    del given["uniform_samples"]
    out = run(backend, given, target_law=laws.TokenV3(alpha))
    p = torch.from_numpy(float64_law(given["target_logits"]))
    share = p[:, :3].gather(-1, given["draft_tokens"][..., None])[..., 0] / p[:, :3].amax(-1)
    assert ((share - (1 - alpha)).abs() > 1e-6).logical_or(share == 1).all()
    accepted = (share >= 1 - alpha).long().cumprod(1).sum(1)
    assert torch.equal(out.num_accepted.cpu().long(), accepted)
    final = out.tokens.cpu().gather(1, accepted[:, None])
    assert torch.equal(final, given["target_logits"].argmax(-1).gather(1, accepted[:, None]))


@pytest.mark.parametrize("loss", ["0-1", "log"])
@pytest.mark.parametrize("alpha", [0.02, 0.2])
def test_opt_at_temperature_0_is_diff(backend: Backend, alpha: float, loss: str) -> None:
    """Lemma 10."""
    zero = sk.SamplingParams(0.0)
    given = chain(backend, params=zero, draft_params=zero)
    opt, diff = (run(backend, given, target_law=law(alpha, loss=loss)) for law in (laws.Opt, laws.Diff))
    same_bits(opt, diff)


@pytest.mark.parametrize("law", [laws.Lossy(0.4), laws.Lossy(0.4, beta="exact")], ids=named)
def test_lossy_at_temperature_0_is_lossless(backend: Backend, law: TargetLaw) -> None:
    """Appendix C.2."""
    given = chain(backend, params=sk.SamplingParams(0.0))
    same_bits(run(backend, given, target_law=law), run(backend, given))


UNLIKELY = [  # (law, the target's logit of 1, the draft's, accepted): p(1) = e^−95, or 0; Q(1) = 0.12, or 0.88
    (laws.BiLD(12.0), -95.0, -2.0, True),  # −Σ q log p = 0.12 · 95 + 0.07 = 11.3
    (laws.BiLD(11.0), -95.0, -2.0, False),
    (laws.BiLD(1e30), -torch.inf, -2.0, False),
    (laws.BiLD(1e39), -torch.inf, -2.0, False),
    (laws.BiLD(96.0, distance="argmax"), -95.0, 2.0, True),
    (laws.BiLD(95.0, distance="argmax"), -95.0, 2.0, False),
]


@pytest.mark.parametrize(("law", "target", "draft", "accepted"), UNLIKELY)
def test_distance_does_not_underflow_with_the_probability(
    backend: Backend, law: TargetLaw, target: float, draft: float, accepted: bool
) -> None:
    """BiLD measures nats, of which there are 95 where float32 has no probability left."""
    out = backend.verify_chain(
        *backend(torch.tensor([[[0.0, target, -3.0]] * 2]), torch.tensor([[1]]), torch.tensor([[[0.0, draft, -5.0]]])),
        uniform_samples=backend(torch.tensor([[0.0, 0.5]])), target_law=law,
    )  # fmt: skip
    assert out.tokens.tolist() == ([[1, 0]] if accepted else [[0, -1]])


NEAR_1 = [  # (law, ids, of each sequence the target's logit of 0, the coin, and whether 0 is accepted); Q = 1 / ids
    # P / ((1 − α) Q) = 0.4
    (laws.Lossy(0.99999), 2, [(math.log(2e-6), 0.3997, True), (math.log(2e-6), 0.4003, False)]),
    (laws.Lossy(1 - 1e-8), 2, [(math.log(2e-9), 0.3997, True), (math.log(2e-9), 0.4003, False)]),
    (laws.TokenV3(1 - 1e-8), 2, [(math.log(2e-8), 0.5, True), (math.log(5e-9), 0.5, False), (-torch.inf, 0.5, False)]),
    # max q = 1/16 < 1 − α: P, where 0 is impossible
    (laws.Chow(15 / 16 - 1e-8), 16, [(-torch.inf, 0.5, False)]),
    (laws.Chow(15 / 16 + 1e-8), 16, [(-torch.inf, 0.5, True)]),
]


@pytest.mark.parametrize(("law", "ids", "sequences"), NEAR_1)
def test_alpha_counts_by_what_it_is_below_1(
    backend: Backend, law: TargetLaw, ids: int, sequences: list[tuple[float, float, bool]]
) -> None:
    """1 − α is not that of a float32 α, which would be off by 6e-8."""
    logit, coins, accepted = zip(*sequences, strict=True)
    target = torch.zeros(len(sequences), 2, ids)
    target[:, 0, 0] = torch.tensor(logit)
    out = backend.verify_chain(
        *backend(target, torch.zeros(len(sequences), 1, dtype=torch.int64), torch.zeros(len(sequences), 1, ids)),
        uniform_samples=backend(torch.tensor([[0.5, coin] for coin in coins])), target_law=law,
    )  # fmt: skip
    assert out.num_accepted.tolist() == list(map(int, accepted)) and not out.status.any()


@pytest.mark.parametrize("of_draft", [True, False])
def test_raw_probabilities_keep_their_digits_where_logits_are_large(backend: Backend, of_draft: bool) -> None:
    """Half of the mass each: log-normalisers near 16384 are 0.002 apart."""
    large, flat = torch.tensor([16384.0, 16384.0] + [-torch.inf] * 3), torch.zeros(5)
    for alpha, accepted in ((0.4999, False), (0.5001, True)) if of_draft else ((0.2999, False), (0.3001, True)):
        law: TargetLaw = laws.Chow(alpha) if of_draft else laws.Diff(alpha)
        target, draft = (flat, large) if of_draft else (large, flat)
        out = backend.verify_chain(
            *backend(target.expand(1, 2, 5), torch.tensor([[1 if of_draft else 4]]), draft.expand(1, 1, 5)),
            uniform_samples=backend(torch.tensor([[0.9, 0.9]])), target_law=law,
        )  # fmt: skip
        assert out.num_accepted.tolist() == [int(accepted)]


@pytest.mark.short(emulated=6)
@each(LAWS, ["stats"])
def test_packed_gives_the_tokens_of_the_chain(backend: Backend, acceptance: str, kind: str, law: TargetLaw) -> None:
    rng = torch.Generator().manual_seed(29)
    given = chains.make(rng, backend.batch(30), 3, 40, kind=kind, acceptance=acceptance, law=law)
    counts = torch.arange(len(given["draft_tokens"])) % 4
    chained = run(backend, given, num_draft_tokens=counts)
    packed = backend.verify_packed(**chains.on(backend, chains.packed(given, counts)))
    same_bits(packed, chained)
