"""verify_chain on every backend against the float64 oracle, over draft kinds, dtypes, sizes, strides and bad values."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import specdec_kernels as sk
from python_tests.ops import chains
from python_tests.ops.chains import DRAFT_PARAMS, run
from python_tests.ops.inputs import DTYPES, logits, refuses, same_bits, strided, tensors, uniforms
from python_tests.support import Backend, in_fresh_process
from specdec_kernels import laws
from specdec_kernels.ops.arguments import ACCEPTANCES

OP = "verify_chain"
SIGNATURE = (
    ["target_logits", "draft_tokens", "draft_logits"],
    ["uniform_samples", "noise_keys", "seeds", "step", "positions", "params", "draft_params", "processors",
     "acceptance", "target_law", "target_probs", "draft_probs", "draft_index",
     "draft_stats", "draft_token_map", "num_draft_tokens", "bonus_tokens",
     "eos_token_ids", "return_acceptance", "backend"],
)  # fmt: skip
SEEDS = {"seeds": torch.arange(5), "step": torch.arange(5)}
POSITIONS = torch.arange(20).view(5, 4)
CALLS = {
    "token": lambda: chains.small("token", "full"),
    "block": lambda: chains.small("block", "reduced", return_acceptance=True),
    "match": lambda: chains.small("match", "one_hot"),
    "seeds": lambda: {**chains.small("token", "full", **SEEDS), "uniform_samples": None},
    "seeds-match": lambda: {
        **chains.small("match", "one_hot", seeds=torch.arange(5), positions=POSITIONS),
        "noise_keys": None,
    },
    "greedy": lambda: chains.small("greedy", "one_hot", num_draft_tokens=torch.arange(5) - 1),
    "lossy": lambda: chains.small("block", "probs", laws.Lossy(0.3, beta="exact")),
    "opt": lambda: chains.small("token", "reduced", laws.Opt(0.4, bonus="cascade")),
    "target_probs": lambda: chains.with_target_probs(chains.small("block", "probs"), sk.SamplingParams(top_p=0.9)),
    "bonus_tokens": lambda: chains.with_bonus(chains.small("token", "full"), torch.arange(5)),
}
RATIO = ("token", "block")
PARAMS = sk.SamplingParams(0.9, top_k=60, top_p=0.95, min_p=0.01)


@pytest.mark.parametrize("kind", chains.KINDS)
@pytest.mark.parametrize("acceptance", ["token", "block", "match", "greedy"])
@pytest.mark.parametrize("vocab", [2, 3, 1023, 1024, 1025, 4097])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_is_the_oracles(backend: Backend, dtype: torch.dtype, vocab: int, acceptance: str, kind: str) -> None:
    rng = torch.Generator().manual_seed(vocab)
    arguments = chains.make(rng, 6, 4, vocab, kind=kind, acceptance=acceptance, dtype=dtype, by=backend)
    out = run(backend, arguments)
    assert (out.status == 0).all()
    assert chains.check(arguments, out) <= 2


@pytest.mark.parametrize("kind", chains.KINDS)
@pytest.mark.parametrize("acceptance", ["token", "block", "match"])
@pytest.mark.parametrize("vocab", [3, 900, 2500])
def test_truncated_laws(backend: Backend, vocab: int, acceptance: str, kind: str) -> None:
    rng = torch.Generator().manual_seed(vocab)
    arguments = chains.make(
        rng, backend.batch(12), 3, vocab, kind=kind, acceptance=acceptance, params=PARAMS, draft_params=DRAFT_PARAMS,
        by=backend,
    )  # fmt: skip
    assert chains.check(arguments, run(backend, arguments)) <= 1


@pytest.mark.parametrize(
    ("batch", "num_draft", "vocab"),
    [(1, 0, 2), (3, 0, 1500), (1, 1, 7), (1024, 2, 17), (1024, 0, 5), (3, 64, 50), (2, 3, 50257), (1, 2, 262144)],
)
@pytest.mark.parametrize("acceptance", ["token", "block", "match", "greedy"])
def test_sizes(backend: Backend, acceptance: str, batch: int, num_draft: int, vocab: int) -> None:
    batch, vocab = backend.batch(batch), backend.vocab(vocab)
    rng = torch.Generator().manual_seed(batch + num_draft + vocab)
    arguments = chains.make(rng, batch, num_draft, vocab, acceptance=acceptance)
    borderline = chains.check(arguments, run(backend, arguments))
    assert borderline <= max(2, batch // 50)


@pytest.mark.short(triton=1)
@pytest.mark.parametrize("acceptance", ["token", "block", "match"])
def test_a_greedy_row_beside_sampled_rows(backend: Backend, acceptance: str) -> None:
    rng = torch.Generator().manual_seed(3)
    n, t = 30, torch.tensor([0.0, 0.7, 1.0, 1.5, 0.0])
    params = sk.SamplingParams(
        t.repeat(6), torch.randint(0, 30, (n,), generator=rng), torch.rand(n, generator=rng) + 0.2,
        torch.rand(n, generator=rng) * 0.1,
    )  # fmt: skip
    draft_params = sk.SamplingParams(
        t.flip(0).repeat(6), torch.tensor([0, 5, 40]).repeat(10), torch.rand(n, generator=rng) + 0.3
    )
    arguments = chains.make(rng, n, 4, 300, acceptance=acceptance, params=params, draft_params=draft_params)
    whole = run(backend, arguments)
    assert chains.check(arguments, whole) <= 1
    for b in range(backend.batch(n)):
        one = chains.select(arguments, slice(b, b + 1))
        same_bits(run(backend, one).tokens[0], whole.tokens[b])
        if acceptance != "match":
            scalar = {
                p: sk.SamplingParams(*(float(f[0]) if i != 1 else int(f[0]) for i, f in enumerate(
                    v for k, v in vars(one[p]).items() if isinstance(v, torch.Tensor))))
                for p in ("params",)
            }  # fmt: skip
            same_bits(run(backend, {**one, **scalar}).tokens[0], whole.tokens[b])


@pytest.mark.short(emulated=3, triton=1)
@pytest.mark.parametrize("kind", chains.KINDS)
@pytest.mark.parametrize("acceptance", ["token", "block", "match", "greedy"])
@pytest.mark.parametrize("vocab", [5, 1300])
def test_a_sequence_does_not_depend_on_neighbours_slot_or_padding(
    backend: Backend, vocab: int, acceptance: str, kind: str
) -> None:
    """Peers' tokens depend on the batch slot. Alone, in a batch of 64, shuffled, and with K padded: the same bits."""
    rng, n = torch.Generator().manual_seed(vocab), backend.batch(24 if backend.interpreted else 64)
    arguments = chains.make(
        rng, n, 3, vocab, kind=kind, acceptance=acceptance, params=PARAMS, draft_params=DRAFT_PARAMS,
        by=backend,
    )  # fmt: skip
    whole = run(backend, arguments, return_acceptance=True)
    order = torch.randperm(n, generator=rng)
    shuffled = run(backend, chains.select(arguments, order), return_acceptance=True)
    index = order.to(backend.device)
    for field in ("tokens", "num_accepted", "num_tokens", "status", "acceptance"):
        same_bits(getattr(shuffled, field), getattr(whole, field)[index])
    for b in (0, n // 4, n - 1):
        same_bits(run(backend, chains.select(arguments, slice(b, b + 1)), return_acceptance=True), sk.VerifyOutput(
            *(getattr(whole, f)[b : b + 1] for f in ("tokens", "num_accepted", "num_tokens", "status", "acceptance"))
        ))  # fmt: skip
    for count, extra, garbage in ((min(8, n), 1, -1), (min(8, n), 13, 2**40), (2, 61, 0)):
        wide = run(backend, chains.pad(chains.select(arguments, slice(0, count)), extra, garbage))
        same_bits(wide.tokens[:, :4].contiguous(), whole.tokens[:count])
        assert (wide.tokens[:, 4:] == -1).all() and (wide.status == 0).all()
        same_bits(wide.num_tokens, whole.num_tokens[:count])


@pytest.mark.short(cases=10, emulated=4)
@pytest.mark.parametrize("kind", chains.KINDS)
@pytest.mark.parametrize("acceptance", ["token", "block", "match", "greedy"])
def test_ragged_idle_placeholders_and_eos(backend: Backend, acceptance: str, kind: str) -> None:
    rng, n = torch.Generator().manual_seed(11), backend.batch(48)
    for vocab in (4, 1100):
        arguments = chains.make(rng, n, 5, vocab, kind=kind, acceptance=acceptance, by=backend)
        arguments["num_draft_tokens"] = torch.randint(-1, 6, (n,), generator=rng, dtype=torch.int32)
        arguments["draft_tokens"][torch.rand(n, 5, generator=rng) < 0.1] = -1
        arguments["eos_token_ids"] = torch.tensor([1, 3])
        arguments["draft_tokens"][torch.rand(n, 5, generator=rng) < 0.1] = 3
        out = run(backend, arguments)
        assert chains.check(arguments, out) <= 2
        assert ((out.status == 0) | ((kind == "reduced") & (out.status == sk.Status.BAD_DRAFT))).all()  # the EOS
        arguments["num_draft_tokens"] = arguments["num_draft_tokens"].long()
        same_bits(run(backend, arguments), out)
        arguments["draft_tokens"] = arguments["draft_tokens"].int()
        same_bits(run(backend, arguments), out)


def test_no_token_after_an_accepted_eos(backend: Backend) -> None:
    target = torch.full((2, 4, 6), -20.0)
    target[..., 2] = 20.0  # everything but id 2 is nearly impossible
    out = run(backend, {
        "target_logits": target, "draft_tokens": torch.full((2, 3), 2), "uniform_samples": torch.full((2, 4), 0.5),
        "eos_token_ids": torch.tensor([5, 2]), "num_draft_tokens": torch.tensor([3, 0], dtype=torch.int32),
    })  # fmt: skip
    assert out.tokens.tolist() == [[2, -1, -1, -1], [2, -1, -1, -1]]
    assert out.num_accepted.tolist() == [1, 0] and out.num_tokens.tolist() == [1, 1]


@pytest.mark.parametrize("kind", chains.KINDS)
@pytest.mark.parametrize("acceptance", ["token", "block", "match", "greedy"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strides_do_not_matter(backend: Backend, dtype: torch.dtype, acceptance: str, kind: str) -> None:
    rng = torch.Generator().manual_seed(13)
    arguments = chains.on(
        backend,
        chains.make(rng, 5, 3, 1100, kind=kind, acceptance=acceptance, dtype=dtype, by=backend),
    )
    dense = backend.verify_chain(**arguments)
    turned = dict(arguments)
    for name in ("target_logits", "draft_logits", "draft_probs"):
        if name in turned:
            turned[name] = strided(turned[name])
    for name in ("draft_tokens", "uniform_samples", "noise_keys"):
        if name in turned:
            turned[name] = turned[name].t().contiguous().t()
    same_bits(dense, backend.verify_chain(**turned))
    turned["target_logits"] = arguments["target_logits"].transpose(0, 1).contiguous().transpose(0, 1)
    same_bits(dense, backend.verify_chain(**turned))
    expanded = {k: v[:1].expand(4, *v.shape[1:]) if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
    if "draft_stats" in expanded:
        s = arguments["draft_stats"]
        expanded["draft_stats"] = sk.RowStats(*(t[:1].expand(4, *t.shape[1:]) for t in (s.values, s.argmax, s.status)))
    assert (backend.verify_chain(**expanded).tokens == dense.tokens[:1]).all()


def test_draft_stats_are_used_as_given(backend: Backend) -> None:
    """A drawn token keeps the probability it had, although the cut-off is recomputed elsewhere on other bits."""
    rng = torch.Generator().manual_seed(19)
    n = backend.batch(32)
    arguments = chains.make(rng, n, 3, 500, kind="stats", draft_params=DRAFT_PARAMS, by=backend)
    with_stats = run(backend, arguments)
    without = run(backend, {k: v for k, v in arguments.items() if k != "draft_stats"})
    same_bits(with_stats, without)
    stats = arguments["draft_stats"]
    values = stats.values.clone()
    values[..., 0] += 20  # as if Q were tiny: everything is accepted
    doctored = sk.RowStats(values, stats.argmax, stats.status)
    assert (run(backend, {**arguments, "draft_stats": doctored}).num_accepted >= with_stats.num_accepted).all()
    assert run(backend, {**arguments, "draft_stats": doctored}).num_accepted.sum() > with_stats.num_accepted.sum()


# --- the match and greedy rules ---------------------------------------------------------------------------------------


@pytest.mark.short(triton=2)
@pytest.mark.parametrize(
    "params", [sk.SamplingParams(), PARAMS, sk.SamplingParams(0.0)], ids=["plain", "truncated", "greedy"]
)
@pytest.mark.parametrize("vocab", [6, 1500])
def test_match_emits_the_stream_of_plain_sampling(backend: Backend, vocab: int, params: sk.SamplingParams) -> None:
    """Whatever is drafted, what comes out is what `sample` draws with the same keys."""
    rng = torch.Generator().manual_seed(23)
    n = backend.batch(20)
    x = backend(logits(rng, n, 6, vocab))
    keys = backend(sk.noise_keys(torch.arange(n), torch.arange(6).expand(n, 6)))
    plain = backend.sample(x, params, noise_keys=keys).token
    for wrong in range(6):
        draft = plain[:, :5].clone()
        if wrong < 5:
            draft[:, wrong] = (draft[:, wrong] + 1) % vocab
        out = backend.verify_chain(x, draft, noise_keys=keys, params=params, acceptance="match")
        assert (out.num_accepted == wrong).all()
        same_bits(out.tokens[:, : wrong + 1].contiguous(), plain[:, : wrong + 1].contiguous())


def test_match_drafting_with_the_same_noise_accepts_at_the_promised_rate(backend: Backend) -> None:
    """Acceptance >= (1 − TV) / (1 + TV) when target and draft draw with the same noise."""
    rng = torch.Generator().manual_seed(29)
    n = backend.draws(4000)
    target, draft = logits(rng, 1, 2, 40, spread=1.0), logits(rng, 1, 1, 40, spread=1.0)
    keys = backend(sk.noise_keys(torch.arange(n), torch.arange(2).expand(n, 2)))
    token = backend.sample(backend(draft).expand(n, 1, 40), noise_keys=keys[:, :1].contiguous()).token
    out = backend.verify_chain(backend(target).expand(n, 2, 40), token, noise_keys=keys, acceptance="match")
    tv = (target[0, 0].double().softmax(-1) - draft[0, 0].double().softmax(-1)).abs().sum().item() / 2
    rate = out.num_accepted.double().mean().item()
    error = 2.5 / n**0.5  # five standard deviations
    assert (1 - tv) / (1 + tv) - error < rate < 1 - tv + error


def test_greedy_is_the_argmax_whatever_the_temperature(backend: Backend) -> None:
    rng = torch.Generator().manual_seed(31)
    n = backend.batch(40)
    x = logits(rng, n, 4, 900, dtype=torch.bfloat16).round()  # ties: the lowest id
    best = torch.from_numpy(x.float().numpy().argmax(-1))
    draft = torch.where(torch.rand(n, 3, generator=rng) < 0.3, (best[:, :3] + 1) % 900, best[:, :3])
    for params in (sk.SamplingParams(0.0), sk.SamplingParams(1.7, top_k=3)):
        out = run(backend, {"target_logits": x, "draft_tokens": draft, "acceptance": "greedy", "params": params})
        agree = (draft == best[:, :3]).int().cumprod(-1).sum(-1)
        assert torch.equal(out.num_accepted.cpu().long(), agree)
        expected = torch.where(torch.arange(4) <= agree[:, None], best, -1)
        assert torch.equal(out.tokens.cpu(), expected)
    for acceptance in RATIO:  # temperature 0 needs no uniforms, and gives the same
        out = run(
            backend,
            {"target_logits": x, "draft_tokens": draft, "acceptance": acceptance, "params": sk.SamplingParams(0.0)},
        )
        assert torch.equal(out.tokens.cpu(), expected)


# --- what only values can show ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["full", "one_hot", "stats"])
@pytest.mark.parametrize("acceptance", ["token", "block", "match", "greedy"])
@pytest.mark.parametrize("vocab", [6, 1100])
def test_bad_rows_are_flagged_and_neighbours_unaffected(
    backend: Backend, vocab: int, acceptance: str, kind: str
) -> None:
    rng, s = torch.Generator().manual_seed(37), sk.Status
    arguments = chains.make(rng, 8, 3, vocab, kind=kind, acceptance=acceptance, by=backend)
    clean = run(backend, arguments)
    target = arguments["target_logits"]
    target[1, 0, 2], target[2, 0], target[3, 0], target[4, 0, 3] = math.nan, -math.inf, math.nan, math.inf
    out = run(backend, arguments)
    for b, flags in ((1, s.NAN), (2, s.EMPTY_ROW), (3, s.NAN | s.EMPTY_ROW), (4, s.INF)):
        assert out.status[b] & flags == flags, f"sequence {b}: {s(int(out.status[b]))!r}"
    assert chains.check(arguments, out) <= 1
    for b in (0, 5, 6, 7):
        same_bits(out.tokens[b], clean.tokens[b])
        assert out.status[b] == 0
    assert out.tokens[2, 0] == out.tokens[3, 0] == 0 and out.tokens[4, 0] == 3


@pytest.mark.parametrize("acceptance", RATIO)
def test_bad_draft_rows(backend: Backend, acceptance: str) -> None:
    rng, s = torch.Generator().manual_seed(41), sk.Status
    arguments = chains.make(rng, 6, 2, 50, acceptance=acceptance)
    draft = arguments["draft_logits"]
    draft[0, 0, 7], draft[1, 0], draft[2, 0], draft[3, 0, 9] = math.nan, math.nan, -math.inf, math.inf
    out = run(backend, arguments)
    for b, flag in ((0, s.NAN), (1, s.NAN | s.EMPTY_ROW), (2, s.EMPTY_ROW), (3, s.INF)):
        assert out.status[b] & flag == flag
    assert out.status[4:].tolist() == [0, 0]
    assert chains.check(arguments, out) <= 1


@pytest.mark.parametrize("acceptance", ["token", "block", "match", "greedy"])
def test_ids_out_of_range_end_the_block(backend: Backend, acceptance: str) -> None:
    rng = torch.Generator().manual_seed(43)
    bad = [-2, -(2**63), 50, 51, 2**31, 2**32, 2**32 + 3, 2**63 - 1]
    arguments = chains.make(rng, len(bad) + 1, 3, 50, acceptance=acceptance)
    clean = run(backend, arguments)
    arguments["draft_tokens"][:-1, 1] = torch.tensor(bad)
    out = run(backend, arguments)
    assert (out.status[:-1] == sk.Status.BAD_TOKEN).all() and out.status[-1] == 0
    assert (out.num_accepted[:-1] <= 1).all()
    same_bits(out.tokens[-1], clean.tokens[-1])
    assert chains.check(arguments, out) <= 1


@pytest.mark.parametrize("acceptance", RATIO)
def test_bad_uniforms_are_flagged(backend: Backend, acceptance: str) -> None:
    rng = torch.Generator().manual_seed(47)
    values = [math.nan, math.inf, -math.inf, 1.0, 1.5, -0.1, -1e-30]
    arguments = chains.make(rng, 2 * len(values) + 1, 2, 50, acceptance=acceptance)
    u = arguments["uniform_samples"]
    u[: len(values), 0], u[len(values) : -1, 1] = torch.tensor(values), torch.tensor(values)
    out = run(backend, arguments)
    assert (out.status[:-1] == sk.Status.BAD_PARAM).all() and out.status[-1] == 0
    used = torch.arange(3, device=out.tokens.device) < out.num_tokens[:, None]
    assert ((out.tokens >= 0) & (out.tokens < 50))[used].all() and (out.tokens[~used] == -1).all()


def test_an_idle_row_reads_no_uniform(backend: Backend) -> None:
    arguments = chains.make(torch.Generator().manual_seed(56), 3, 2, 20)
    arguments["uniform_samples"] = torch.full((3, 3), math.nan)
    out = run(backend, arguments, num_draft_tokens=torch.tensor([-1, -1, -1], dtype=torch.int32))
    assert out.status.tolist() == [0, 0, 0] and (out.tokens == -1).all()


@pytest.mark.parametrize("acceptance", ["token", "block", "match", "greedy"])
def test_bad_lengths_are_clamped_and_flagged(backend: Backend, acceptance: str) -> None:
    rng = torch.Generator().manual_seed(53)
    arguments = chains.make(rng, 6, 3, 50, acceptance=acceptance)
    whole = run(backend, arguments)
    arguments["num_draft_tokens"] = torch.tensor([3, 4, 2**31 - 1, -1, -2, -(2**31)], dtype=torch.int32)
    out = run(backend, arguments)
    bad = sk.Status.BAD_PARAM
    assert out.status.tolist() == [0, bad, bad, 0, bad, bad]
    same_bits(out.tokens[:3].contiguous(), whole.tokens[:3].contiguous())
    assert (out.tokens[3:] == -1).all() and (out.num_tokens[3:] == 0).all()


def test_bad_parameters_are_flagged(backend: Backend) -> None:
    rng = torch.Generator().manual_seed(59)
    arguments = chains.make(rng, 4, 2, 50)
    clean = run(backend, arguments)
    arguments["params"] = sk.SamplingParams(torch.tensor([1.0, -1.0, math.nan, math.inf]))
    out = run(backend, arguments)
    assert out.status.tolist() == [0, sk.Status.BAD_PARAM, sk.Status.BAD_PARAM, sk.Status.BAD_PARAM]
    same_bits(out.tokens, clean.tokens)


@pytest.mark.parametrize("kind", chains.KINDS)
def test_rows_after_the_rejection_are_not_read(backend: Backend, kind: str) -> None:
    """The walk ends early: NaN rows behind the first rejected token change nothing and set no flag."""
    rng = torch.Generator().manual_seed(61)
    n = 24 if backend.interpreted else 64
    arguments = chains.make(rng, n, 4, 1100, kind=kind, by=backend, spread=3.0)
    clean = run(backend, arguments)
    behind = torch.arange(5) > clean.num_accepted.cpu()[:, None]
    arguments["target_logits"] = arguments["target_logits"].masked_fill(behind[..., None], math.nan)
    for name in ("draft_logits", "draft_probs"):
        if name in arguments:
            arguments[name] = arguments[name].masked_fill(behind[:, :4, None], math.nan)
    assert (clean.num_accepted < 4).any() and (clean.num_accepted > 0).any()
    same_bits(run(backend, arguments), clean)


def test_inputs_are_untouched(backend: Backend) -> None:
    rng = torch.Generator().manual_seed(67)
    for acceptance in ("token", "block", "match", "greedy"):
        for kind in chains.KINDS:
            arguments = chains.on(backend, chains.make(rng, 4, 3, 60, acceptance=acceptance, kind=kind, params=PARAMS))
            arguments["draft_tokens"][0, 1] = -7
            arguments["target_logits"][1, 0, 2] = math.nan
            before = [t.clone() for t in tensors(arguments)]
            backend.verify_chain(**arguments)
            same_bits(before, tensors(arguments))


def test_specdec_check_raises() -> None:
    """With SPECDEC_CHECK=1 what only values can show raises, naming row and flag; without it, it does not."""
    code = """
import torch, specdec_kernels as sk
x = torch.zeros(3, 2, 5); x[1, 1, 2] = float("nan")
try:
    sk.verify_chain(x, torch.ones(3, 1, dtype=torch.int64), uniform_samples=torch.full((3, 2), 0.1))
    print("no error")
except RuntimeError as error:
    print(error)
def masked(rows):
    return sk.mask_logits_(rows.clone(), sk.SamplingParams()) if rows.dim() < 4 else None
for rows in (x, x[:, 1], x[1, 1], x.reshape(1, 3, 2, 5)):
    for op in (sk.row_stats, masked):
        try:
            op(rows); print("no error")
        except RuntimeError as error:
            print(error)
"""
    lines = in_fresh_process(code, SPECDEC_CHECK="1").splitlines()
    assert lines[0].startswith("verify_chain: row 1 set <Status.NAN")
    assert [line.partition(" set <Status.NAN")[0] for line in lines[1:]] == [
        f"{op}: {row}"
        for row in ("row [1, 1]", "row 1", "row 0", "row [0, 1, 1]")
        for op in ("row_stats", "mask_logits_")
    ][:-1] + ["no error"]  # the last has too many dimensions for it
    assert set(in_fresh_process(code, SPECDEC_CHECK="0").splitlines()) == {"no error"}


def test_parameters_may_be_written_to_between_calls(backend: Backend, rng: torch.Generator) -> None:
    """As between replays of a captured graph; of the dtypes in which they are read."""
    given = {"temperature": torch.full((4,), 9.0), "top_k": torch.zeros(4).long(), "min_p": torch.zeros(4)}
    buffers = {name: backend(value) for name, value in given.items()}
    params = sk.SamplingParams(**buffers, top_p=backend(torch.ones(4)))
    arguments = chains.make(rng, 4, 3, 60, kind="one_hot")
    arguments["draft_tokens"] = arguments["target_logits"][:, :3].argmax(-1)
    arguments = chains.on(backend, {name: value for name, value in arguments.items() if name != "params"})
    before = backend.verify_chain(**arguments, params=params)
    new = {
        "temperature": torch.tensor([0.0, 0.5, 1.0, 0.7]),
        "top_k": torch.full((4,), 3),
        "min_p": torch.full((4,), 0.1),
    }
    for name, value in new.items():
        buffers[name].copy_(value)
    after = backend.verify_chain(**arguments, params=params)
    same_bits(after, backend.verify_chain(**arguments, params=backend(sk.SamplingParams(**new))))
    assert not torch.equal(after.tokens, before.tokens)


def test_token_id_0_is_a_token(backend: Backend) -> None:
    target = torch.full((1, 2, 4), -30.0)
    target[..., 0] = 30.0
    out = run(
        backend,
        {"target_logits": target, "draft_tokens": torch.zeros(1, 1).long(), "uniform_samples": torch.full((1, 2), 0.9)},
    )
    assert out.tokens.tolist() == [[0, 0]] and out.num_accepted.tolist() == [1]


# --- refusals ---------------------------------------------------------------------------------------------------------

GOOD: dict[str, Any] = {
    "target_logits": torch.zeros(4, 3, 9), "draft_tokens": torch.zeros(4, 2, dtype=torch.int64),
    "draft_logits": torch.zeros(4, 2, 9), "uniform_samples": torch.full((4, 3), 0.5),
}  # fmt: skip
STATS = sk.RowStats(torch.zeros(4, 2, 6), torch.zeros(4, 2, dtype=torch.int64), torch.zeros(4, 2, dtype=torch.int32))
SHORT = sk.RowStats(torch.zeros(4, 1, 6), torch.zeros(4, 1, dtype=torch.int64), torch.zeros(4, 1, dtype=torch.int32))
MATCH: dict[str, Any] = {"acceptance": "match", "uniform_samples": None}
NO_DRAFT: dict[str, Any] = {"draft_logits": None}
PROBS: dict[str, Any] = {"target_logits": None, "target_probs": torch.full((4, 3, 9), 1 / 9)}
V, T = ValueError, TypeError
REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"target_logits": [0.0]}, T, "target_logits must be a tensor, got list"),
    ({"target_logits": torch.zeros(4, 3, 9).double()}, T, "target_logits must be float32 or bfloat16 or float16, got"),
    ({"target_logits": torch.zeros(3, 9)}, V, "target_logits must be [batch, num_draft + 1, vocab], got [3, 9]"),
    ({"target_logits": torch.zeros(4, 0, 9)}, V, "target_logits must be [batch, num_draft + 1, vocab], got [4, 0, 9]"),
    ({"target_logits": torch.zeros(4, 3, 1)}, V, "target_logits must be [..., vocab] with 2 <= vocab"),
    ({"target_logits": torch.zeros(4, 9, 3).transpose(1, 2)}, V, "target_logits must be contiguous in its last"),
    ({"draft_tokens": [[1]]}, T, "draft_tokens must be a tensor, got list"),
    ({"draft_tokens": torch.zeros(4, 2)}, T, "draft_tokens must be int64 or int32, got float32"),
    ({"draft_tokens": torch.zeros(4, 2, dtype=torch.int16)}, T, "draft_tokens must be int64 or int32, got int16"),
    ({"draft_tokens": torch.zeros(4, 3, dtype=torch.int64)}, V,
     "draft_tokens must be [batch=4, num_draft (target's rows - 1)=2], got [4, 3]"),
    ({"draft_tokens": torch.zeros(8, dtype=torch.int64)}, V,
     "draft_tokens must be [batch=4, num_draft (target's rows - 1)=2], got [8]"),
    ({"draft_tokens": torch.zeros(4, 2, dtype=torch.int64, device="meta")}, V, "draft_tokens must be on cpu, got meta"),
    ({"draft_logits": torch.zeros(4, 3, 9)}, V, "draft_logits must be [batch=4, num_draft=2, vocab=9], got [4, 3, 9]"),
    ({"draft_logits": torch.zeros(4, 2, 8)}, V, "draft_logits must be [batch=4, num_draft=2, vocab=9], got [4, 2, 8]"),
    ({"draft_logits": torch.zeros(4, 2, 9).long()}, T, "draft_logits must be float32 or bfloat16 or float16, got"),
    ({"draft_logits": torch.zeros(4, 2, 9, device="meta")}, V, "draft_logits must be on cpu, got meta"),
    ({"draft_logits": torch.zeros(4, 9, 2).transpose(1, 2)}, V, "draft_logits must be contiguous in its last"),
    ({"draft_probs": torch.zeros(4, 2, 9)}, V, "give draft_logits or draft_probs, got both"),
    ({**NO_DRAFT, "draft_probs": torch.zeros(4, 2, 8)}, V, "draft_probs must be [batch=4, num_draft=2, vocab=9]"),
    ({**NO_DRAFT, "draft_probs": torch.zeros(4, 2, 9).half()}, T, "draft_probs must be float32, got float16"),
    ({**NO_DRAFT, "draft_probs": torch.zeros(4, 9, 2).transpose(1, 2)}, V, "draft_probs must be contiguous in its"),
    ({**NO_DRAFT, "draft_probs": torch.zeros(4, 2, 9, device="meta")}, V, "draft_probs must be on cpu, got meta"),
    ({"target_probs": torch.zeros(4, 3, 9)}, V, "give target_logits or target_probs, got both"),
    ({"target_logits": None}, TypeError, "target_logits must be a tensor, got NoneType"),
    ({**PROBS, "target_probs": torch.zeros(4, 3, 9).half()}, TypeError, "target_probs must be float32, got float16"),
    ({**PROBS, "target_probs": torch.zeros(4, 9)}, V, "target_probs must be [batch, num_draft + 1, vocab], got [4, 9]"),
    ({**PROBS, "target_probs": torch.zeros(4, 9, 3).mT}, V, "target_probs must be contiguous in its last dimension"),
    ({**PROBS, "params": sk.SamplingParams(0.9)}, V, "params.temperature must be 1 or 0 beside target_probs, got 0.9"),
    ({**PROBS, "processors": sk.Processors(banned_ids=[1])}, V, "processors must be None beside target_probs, got one"),
    ({**PROBS, "target_law": laws.Opt(0.1)}, V, "a cascade as target_law must be None beside target_probs, got one"),
    ({**PROBS, "acceptance": "match"}, V, "acceptance='match' needs target_logits, got target_probs"),
    ({"uniform_samples": None}, V, "acceptance='token' needs uniform_samples unless params.temperature is 0"),
    ({"uniform_samples": torch.zeros(4, 2)}, V, "uniform_samples must be [batch=4, num_draft + 1=3], got [4, 2]"),
    ({"uniform_samples": torch.zeros(4, 3).half()}, T, "uniform_samples must be float64 or float32, got float16"),
    ({"uniform_samples": torch.zeros(4, 3, device="meta")}, V, "uniform_samples must be on cpu, got meta"),
    ({"noise_keys": torch.zeros(4, 3).long()}, V, "acceptance='token' takes uniform_samples, got noise_keys"),
    ({"acceptance": "match"}, V, "acceptance='match' takes noise_keys, got uniform_samples"),
    ({"acceptance": "greedy", "noise_keys": torch.zeros(4, 3).long()}, V, "acceptance='greedy' must come without"),
    (MATCH, V, "acceptance='match' needs noise_keys unless params.temperature is 0"),
    ({**MATCH, "noise_keys": torch.zeros(4, 3)}, T, "noise_keys must be int64, got float32"),
    ({**MATCH, "noise_keys": torch.zeros(4, 2).long()}, V, "noise_keys must be [batch=4, num_draft + 1=3], got [4, 2]"),
    ({**MATCH, "noise_keys": torch.zeros(4, 3, device="meta").long()}, V, "noise_keys must be on cpu, got meta"),
    ({"acceptance": "lossy"}, V, f"acceptance must be one of {', '.join(ACCEPTANCES)}, got 'lossy'"),
    ({"acceptance": None}, V, "acceptance must be one of"),
    ({"target_law": "chow"}, T, "target_law must be None or one of sk.laws, got str"),
    ({"target_law": sk.laws.Lossy(0.1), "acceptance": "block"}, V, "acceptance='block' takes Lossy with beta='exact'"),
    ({"target_law": sk.laws.Diff(0.1), **MATCH}, V, "acceptance='match' takes no target_law, got Diff(alpha=0.1"),
    ({"target_law": sk.laws.Diff(0.1), "acceptance": "greedy"}, V, "acceptance='greedy' takes no target_law (lossy gr"),
    ({"target_law": sk.laws.Diff(0.1), **NO_DRAFT}, V, "this target_law needs draft_logits, got none: Diff(alpha=0.1"),
    ({"target_law": sk.laws.Opt(0.1, bonus="cascade")}, V, "draft_logits must be [batch=4, num_draft + 1=3, vocab=9]"),
    (
        {"target_law": sk.laws.BiLD(1.0, distance="argmax"), "draft_token_map": sk.TokenMap(torch.arange(9))},
        V, "BiLD with distance='argmax' takes no draft_token_map, got one",
    ),
    (
        {"target_law": sk.laws.TokenV3(0.1), "params": sk.SamplingParams(0.0), "uniform_samples": None},
        V, "this target_law needs uniform_samples unless params.temperature and draft_params.temperature are 0",
    ),
    ({"params": 1.0}, T, "params must be a SamplingParams or None, got float"),
    ({"params": sk.SamplingParams(torch.ones(3))}, V, "params.temperature must be [batch=4], got [3]"),
    ({"draft_params": "greedy"}, T, "draft_params must be a SamplingParams or None, got str"),
    ({"draft_params": sk.SamplingParams(top_p=torch.ones(12))}, V, "draft_params.top_p must be [batch=4], got [12]"),
    ({"draft_params": sk.SamplingParams(min_p=torch.ones(4, device="meta"))}, V, "draft_params.min_p must be on cpu"),
    ({"draft_stats": torch.zeros(4, 2, 6)}, T, "draft_stats must be a RowStats, got Tensor"),
    ({"draft_stats": SHORT}, V, "draft_stats.values must be [batch=4, num_draft=2, values=6], got [4, 1, 6]"),
    ({"draft_stats": sk.RowStats(STATS.values.double(), STATS.argmax, STATS.status)}, T, "draft_stats.values must be"),
    ({"draft_stats": sk.RowStats(STATS.values, STATS.argmax.int(), STATS.status)}, T, "draft_stats.argmax must be"),
    ({"draft_stats": sk.RowStats(STATS.values, STATS.argmax, STATS.status.long())}, T, "draft_stats.status must be"),
    ({"draft_stats": sk.RowStats(STATS.values, SHORT.argmax, STATS.status)}, V, "draft_stats.argmax must be"),
    ({"draft_stats": sk.RowStats(STATS.values, STATS.argmax, SHORT.status)}, V, "draft_stats.status must be"),
    ({"draft_stats": sk.RowStats(STATS.values, STATS.argmax.to("meta"), STATS.status)}, V, "draft_stats.argmax must"),
    ({**NO_DRAFT, "draft_stats": STATS}, V, "draft_stats needs the draft_logits that they describe, got none"),
    ({"draft_token_map": torch.arange(9)}, T, "draft_token_map must be a TokenMap, got Tensor"),
    ({"draft_token_map": sk.TokenMap(torch.arange(5))}, V,
     "draft_logits must be [batch=4, num_draft=2, vocab_draft=5]"),
    ({"draft_token_map": sk.TokenMap(torch.arange(1, 10))}, V, "draft_token_map must map to ids < vocab=9, got 9"),
    ({"draft_token_map": sk.TokenMap(torch.arange(9)).to("meta")}, V, "draft_token_map must be on cpu, got meta"),
    ({**NO_DRAFT, "draft_token_map": sk.TokenMap(torch.arange(5))}, V, "draft_token_map needs draft_logits or"),
    ({"num_draft_tokens": [1, 1, 1, 1]}, T, "num_draft_tokens must be a tensor, got list"),
    ({"num_draft_tokens": torch.ones(4)}, T, "num_draft_tokens must be int64 or int32, got float32"),
    ({"num_draft_tokens": torch.ones(3).int()}, V, "num_draft_tokens must be [batch=4], got [3]"),
    ({"num_draft_tokens": torch.ones(4, device="meta").int()}, V, "num_draft_tokens must be on cpu, got meta"),
    ({"eos_token_ids": 2}, T, "eos_token_ids must be a tensor, got int"),
    ({"eos_token_ids": torch.tensor([2]).int()}, T, "eos_token_ids must be int64, got int32"),
    ({"eos_token_ids": torch.tensor(2)}, V, "eos_token_ids must be [num_eos], got []"),
    ({"eos_token_ids": torch.tensor([2], device="meta")}, V, "eos_token_ids must be on cpu, got meta"),
    ({"backend": "fast"}, V, "backend must be one of"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "error", "message"), REFUSED, ids=[r[2][:60] for r in REFUSED])
def test_refuses(change: dict[str, Any], error: type[Exception], message: str) -> None:
    refuses(sk.verify_chain, GOOD, change, error, f"verify_chain: {message}")


def test_more_tokens_than_int32_counts_are_refused() -> None:
    target, drafted = torch.zeros(1, 1, 9).expand(2**31, 1, 9), torch.zeros(2**31, 0, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"^verify_chain: batch \* \(num_draft \+ 1\) must be < 2\*\*31, got 21474836"):
        sk.verify_chain(target, drafted, acceptance="greedy")


def test_the_good_arguments_of_the_refusals_are_good(backend: Backend) -> None:
    assert (run(backend, GOOD, draft_stats=backend.row_stats(backend(GOOD["draft_logits"]))).status == 0).all()


def test_uniforms_helper_is_on_the_lattice(rng: torch.Generator) -> None:
    u = uniforms(rng, 1000)
    assert (u * 2**53 == (u * 2**53).round()).all() and 0 <= u.min() and u.max() < 1
    assert (u * 2**40 != (u * 2**40).round()).all()


def test_a_draft_of_no_tokens_may_have_any_strides(backend: Backend) -> None:
    """NumPy's arrays without elements have strides of 0, which no row of numbers may have."""
    rng, probs = torch.Generator().manual_seed(0), torch.from_numpy(np.zeros((2, 0, 30), np.float32))
    assert probs.stride() == (0, 0, 0)
    given = {
        "target_logits": logits(rng, 2, 1, 30), "draft_tokens": torch.zeros(2, 0, dtype=torch.int64),
        "uniform_samples": uniforms(rng, 2, 1),
    }  # fmt: skip
    same_bits(tensors(run(backend, {**given, "draft_probs": probs})), tensors(run(backend, given)))
