"""Top-p over a sharded vocabulary: cut-offs that masses of all ranks decide, on every backend."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import specdec_kernels as sk
from python_tests.distributed.ranks import same, sharded
from python_tests.ops import chains
from python_tests.ops.inputs import seeded
from python_tests.support import Backend
from specdec_kernels.distributed import cut, mass

OP = "verify_chain"
EMULATED_CASES = 6
S = sk.SamplingParams
REACHED = 1 - 2.0**-18
WIDTHS = (1300, 7, 1493)
VOCAB = sum(WIDTHS)


def check(backend: Backend, arguments: chains.Arguments, widths: tuple[int, ...] = WIDTHS) -> dict[str, int]:
    """Every rank has the op's output; what the first rank sent."""
    arguments = chains.on(backend, arguments)
    outs, ranks = sharded(arguments, widths, backend.name)
    same(backend.verify_chain(**arguments), outs)
    return ranks.sent[0]


def borders(row: torch.Tensor, temperature: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """A row's values, each once and the largest first, and the share of its mass that is as large or larger."""
    x = row.double()
    weights = ((x - x.max()) / temperature).exp()
    values = x.unique().flip(0)
    return values, torch.stack([weights[x >= v].sum() for v in values[:200]]) / weights.sum()


@pytest.mark.short(cases=2, emulated=1, triton=1)
@pytest.mark.parametrize("off", [-1e-7, 0.0, 1e-7])
@pytest.mark.parametrize("kind", ["one_hot", "full"])
def test_where_rounding_decides_the_op_does(backend: Backend, kind: str, off: float) -> None:
    """top_p is what a cut-off's mass comes to, but for a rounding; of the target's rows, and of the draft's."""
    for seed in range(1 if backend.interpreted else 6):
        arguments = chains.make(torch.Generator().manual_seed(seed), 4, 2, VOCAB, kind=kind, spread=4.0)
        logits = arguments["target_logits" if kind == "one_hot" else "draft_logits"]
        shares = torch.stack([borders(rows[0])[1][3 + 5 * seed] for rows in logits])
        params = S(top_p=(shares / REACHED * (1 + off)).clamp_max(0.999).float())
        arguments["params" if kind == "one_hot" else "draft_params"] = params
        size = logits.element_size() * max(1300 + 748 if r == 0 else VOCAB - 2048 for r in range(3))
        assert check(backend, arguments)["whole rows"] >= 4 * size


@pytest.mark.short(cases=4, emulated=2, triton=0)
@pytest.mark.parametrize("kind", ["one_hot", "full", "probs"])
@pytest.mark.parametrize(
    "params",
    [S(0.9, top_p=0.9), S(top_k=90, top_p=0.8), S(min_p=1e-4, min_p_first=True, top_p=0.9)],
    ids=["alone", "top-k", "min-p first"],
)
def test_rows_that_keep_too_much_are_told_whole(
    backend: Backend, kind: str, params: sk.SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some sequences' rows are, and others' not."""
    monkeypatch.setattr(cut, "MOST", 60)
    arguments = chains.make(seeded(), 4, 2, VOCAB, kind=kind, spread=1.0, params=params, acceptance="block")
    if kind == "full":
        arguments["draft_params"] = params
    arguments["target_logits"][1] *= 8
    if params.top_k:
        arguments["params"] = S(top_k=torch.tensor([90, 20, 20, 61]), top_p=0.8)
    assert check(backend, arguments)["whole rows"]


@pytest.mark.parametrize("params", [S(top_p=0.95), S(top_k=4500), S(top_p=0.9, min_p=1e-3, min_p_first=True)])
def test_more_than_kernels_list(params: sk.SamplingParams) -> None:
    """Of CPU kernels: beyond that they add masses in another order."""
    backend = Backend("cpu", "cpu")
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        arguments = chains.make(generator, 2, 2, 9000, spread=1.0, params=params, draft_params=params)
        assert check(backend, arguments, (4000, 5000))["whole rows"]


@pytest.mark.short(cases=6, emulated=2, triton=1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("step", [0.5, 4.0, 0.0], ids=["ties", "few values", "one value"])
def test_ties_live_and_die_together(
    backend: Backend, step: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a whole row is of one value: all of it is kept."""
    monkeypatch.setattr(cut, "LISTED", 3 if step == 0.5 else 128)
    arguments = chains.make(seeded(), 4, 2, VOCAB, spread=3.0, params=S(top_p=0.7), draft_params=S(top_p=0.9))
    for name in ("target_logits", "draft_logits"):
        x = arguments[name]
        arguments[name] = ((x / step).round() * step if step else torch.full_like(x, 2.5)).to(dtype)
    check(backend, arguments)


@pytest.mark.parametrize("size", [1e-30, 1e-3, 1e3, 1e30])
@pytest.mark.parametrize("shift", [0.0, 20.0])
def test_logits_of_any_size(size: float, shift: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The range narrows in five rounds at most, wherever floats lie densely."""
    monkeypatch.setattr(cut, "LISTED", 1)
    backend = Backend("cpu", "cpu")
    arguments = chains.make(
        seeded(), 2, 2, VOCAB, kind="one_hot", params=S(max(size, 1e-37), top_p=torch.tensor([0.3, 0.9]))
    )
    arguments["target_logits"] = arguments["target_logits"] * size + shift
    sent = check(backend, arguments)
    assert sent["masses of ranges"] in [rounds * 2 * 3 * mass.BINS * 12 for rounds in range(1, 6)]


@pytest.mark.parametrize("listed", [128, 5])
@pytest.mark.parametrize("vocab", [6000, 60000])
def test_bytes_do_not_grow_with_the_vocabulary(vocab: int, listed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """But by its tiles; kept are the same 40 ids of each row, and some that a range holds at last beside them."""
    monkeypatch.setattr(cut, "LISTED", listed)
    batch, rows, tiles = 3, 3, -(-vocab // 1024)
    generator = seeded()
    arguments = chains.make(generator, batch, rows - 1, vocab, kind="one_hot", params=S(top_p=0.5))
    logits = torch.randn(batch, rows, vocab, generator=generator) - math.log(vocab)
    logits[..., torch.randperm(vocab, generator=generator)[:40]] += 4 + math.log(vocab)
    arguments["target_logits"] = logits
    widths = (vocab // 1024 // 2 * 1024, vocab - vocab // 1024 // 2 * 1024)
    sent = check(Backend("cpu", "cpu"), arguments, widths)
    if listed < 40:  # a rank's list ends before what is kept does
        assert sent.pop("masses of ranges") <= 5 * batch * rows * mass.BINS * 12
        assert sent.pop("candidates") <= batch * rows * (40 + mass.FEW) * 8
        assert sent.pop("numbers of candidates") == batch * rows * 8
    most = -(-widths[1] // 1024)
    assert tiles == most + widths[0] // 1024
    assert sent == {
        "widths": 8,
        "stats and largest logits": batch * rows * (2 * 4 * most + 8 + 4 + 4 + 8 + listed * 8),
    }


@pytest.mark.short(cases=4, emulated=1, triton=1)
@pytest.mark.parametrize("seed", range(40))
def test_random_parameters(backend: Backend, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cut, "LISTED", (1, 10, 128)[seed % 3])
    generator = torch.Generator().manual_seed(seed)

    def one(*of: Any) -> Any:
        return of[int(torch.randint(len(of), (), generator=generator))]

    def some() -> sk.SamplingParams:
        return S(
            one(0.5, 1.0, 1.3), top_p=one(0.1, 0.5, 0.9, 0.99, 0.9999), min_p=one(0.0, 0.0, 0.001, 0.02),
            min_p_first=one(False, True), top_k=one(0, 0, 0, 1500),
        )  # fmt: skip

    start = one(1, 700, 1024, 2500)
    arguments = chains.make(
        generator, 3, 3, VOCAB, kind=one("full", "one_hot", "probs"), acceptance=one("token", "block", "match"),
        dtype=one(torch.float32, torch.bfloat16, torch.float16), spread=one(0.01, 0.5, 2.0, 5.0), params=some(),
    )  # fmt: skip
    if "draft_logits" in arguments:
        arguments["draft_params"] = some()
    check(backend, arguments, (start, VOCAB - start))


def test_keys_have_the_order_of_floats() -> None:
    x = torch.tensor([-math.inf, -3e38, -1.0, -1e-45, -0.0, 0.0, 1e-45, 1.0, 3e38, math.inf])
    keys = mass.key_of(x)
    assert keys[4] == keys[5] and keys.unique().tolist() == keys.unique_consecutive().tolist()
    assert torch.equal(mass.from_key(keys), x)
    assert mass.key_of(torch.tensor([torch.finfo(torch.float32).min])) == mass.LOWEST
