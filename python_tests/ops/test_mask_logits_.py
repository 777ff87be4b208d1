"""mask_logits_ on every backend: the cutoff of `row_stats`, what float64 cuts, and every other bit as it was."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

import specdec_kernels as sk
from python_tests.ops.inputs import DTYPES, PARAMS, SCALARS, logits, refuses, seeded
from python_tests.support import Backend
from specdec_kernels.testing import float64_law

OP = "mask_logits_"
SIGNATURE = (["logits", "params"], ["backend"])
CALLS = {
    "": lambda: {"logits": logits(seeded(), 4, 50), "params": SCALARS},
    "3d": lambda: {"logits": logits(seeded(), 4, 3, 50, dtype=torch.bfloat16), "params": sk.SamplingParams(top_k=9)},
}
INTEGERS = {4: torch.int32, 2: torch.int16}


def same_memory(a: Tensor, b: Tensor) -> None:
    """The same bits, those of NaN included."""
    a, b = (x.cpu().contiguous().view(INTEGERS[x.element_size()]) for x in (a, b))
    assert torch.equal(a, b), f"{int((a != b).sum())} of {a.numel()} differ"


def by_cutoff(backend: Backend, x: Tensor, params: sk.SamplingParams) -> tuple[Tensor, Tensor]:
    """What the rows ``[batch, n, vocab]`` become, and their status, as the backend's `row_stats` has it."""
    stats = backend.row_stats(*backend(x, params))
    return x.masked_fill(x < stats.cutoff.cpu()[..., None], -math.inf), stats.status.cpu()


@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("vocab", [2, 1025, 50257])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_is_the_cutoff_and_the_float64_law(
    backend: Backend, dtype: torch.dtype, vocab: int, name: str, rng: torch.Generator
) -> None:
    x, params = logits(rng, 2, 2, backend.vocab(vocab), dtype=dtype), PARAMS[name]
    masked = backend(x.clone())
    status = backend.mask_logits_(masked, params)
    assert status.dtype == torch.int32 and status.tolist() == [[0, 0], [0, 0]]
    same_memory(masked, by_cutoff(backend, x, params)[0])
    if not params.is_greedy:
        np.testing.assert_array_equal((masked > -math.inf).cpu(), float64_law(x, params) > 0)


@pytest.mark.parametrize("first", [0, 1, 6])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bad_rows_and_the_memory_around_rows_stay(
    backend: Backend, dtype: torch.dtype, first: int, rng: torch.Generator
) -> None:
    """Rows at any place, each with its own parameters; NaN of any bits, zeros of both signs, infinities."""
    vocab = 3001
    x = logits(rng, 6, 2, vocab, dtype=dtype)
    x[:, :, 5], x[:, :, 6] = 0.0, -0.0
    x[0, 0, [7, 2050]] = math.nan
    x[0, 1, 8:1500] = -math.inf
    x[1, 0], x[1, 1] = -math.inf, math.nan
    x[2, 0, [3, 2900]] = math.inf
    bits = x.view(INTEGERS[x.element_size()])
    bits[0, 0, 9] = bits[0, 0, 7] + 1  # NaNs with bits of their own, one of them negative
    bits[0, 0, 10] = -2
    params = sk.SamplingParams(
        temperature=torch.tensor([1.0, 0.8, 0.7, 0.0, 1.3, -1.0]), top_k=torch.tensor([40, 3, 3, 3, 0, 2]),
        top_p=torch.tensor([1.0, 0.5, 0.5, 0.5, 0.9, 0.9]), min_p=torch.tensor([0.0, 0.0, 0.1, 0.1, 0.02, 2.0]),
    )  # fmt: skip
    room = torch.full((6, 2 * vocab + 20), 7.0, dtype=dtype)
    place = room[:, first:].as_strided(x.shape, (room.stride(0), vocab + 5, 1), first)
    place.copy_(x)
    expected, flags = by_cutoff(backend, x, params)
    moved = backend(room)
    if moved is not room:
        place = moved.as_strided(x.shape, place.stride(), first)
    assert torch.equal(backend.mask_logits_(place, backend(params)).cpu(), flags)
    assert flags[0, 0] == sk.Status.NAN and flags[1, 0] == sk.Status.EMPTY_ROW and flags[2, 0] == sk.Status.INF
    same_memory(place, expected)
    assert not expected[3].isinf().any()  # greedy
    place.fill_(7.0)
    assert bool((moved == 7.0).all())


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        (sk.SamplingParams(top_k=1), [1, 3]),  # ties stay together
        (sk.SamplingParams(top_k=3), [1, 2, 3, 4]),
        (sk.SamplingParams(top_p=0.01), [1, 3]),
        (sk.SamplingParams(top_p=0.8), [1, 2, 3, 4]),
        (sk.SamplingParams(top_p=0.99), [0, 1, 2, 3, 4, 5]),
        (sk.SamplingParams(top_k=4, top_p=0.74), [1, 2, 3, 4]),  # top-p of what top-k leaves
        (sk.SamplingParams(2.0, top_k=4, top_p=0.65), [1, 2, 3, 4]),  # at that temperature
        (sk.SamplingParams(min_p=0.37), [1, 3]),
        (sk.SamplingParams(min_p=0.36), [1, 2, 3, 4]),
        (sk.SamplingParams(top_p=0.715, min_p=0.2), [1, 2, 3, 4]),
        (sk.SamplingParams(top_p=0.715, min_p=0.2, min_p_first=True), [1, 3]),
        (None, [0, 1, 2, 3, 4, 5]),
    ],
)
def test_ties_and_the_order_of_the_cuts(backend: Backend, params: sk.SamplingParams | None, kept: list[int]) -> None:
    """Shares of e², e and 1, two of each."""
    x = torch.tensor([1.0, 3.0, 2.0, 3.0, 2.0, 1.0])
    masked = backend(x.clone())
    assert backend.mask_logits_(masked, params).shape == ()
    assert masked.isfinite().nonzero()[:, 0].tolist() == kept and torch.equal(masked[kept].cpu(), x[kept])


def test_a_copy_on_write_keeps_what_others_have(backend: Backend, rng: torch.Generator) -> None:
    x = backend(logits(rng, 3, 50))
    before, copy = x.clone(), torch._lazy_clone(x)
    backend.mask_logits_(copy, SCALARS)
    assert torch.equal(x, before) and bool((copy == -math.inf).any())


def test_an_inference_tensor_is_written_to_outside_of_inference_mode(backend: Backend) -> None:
    with torch.inference_mode():
        x = backend(torch.tensor([[3.0, 1.0, 2.0]]))
    backend.mask_logits_(x, sk.SamplingParams(top_k=2))
    assert x.tolist() == [[3, -math.inf, 2]]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"logits": [1.0, 2.0]}, TypeError, "logits must be a tensor, got list"),
        ({"logits": torch.zeros(2, 9, dtype=torch.float64)}, TypeError, "logits must be float32 or"),
        ({"logits": torch.zeros(4, 1)}, ValueError, "logits must be [..., vocab]"),
        ({"logits": torch.zeros(9, 4).T}, ValueError, "logits must be contiguous in its last dimension"),
        ({"logits": torch.zeros(4, 2, 2, 9)}, ValueError, "logits must be [vocab], [batch, vocab] or [batch,"),
        ({"logits": torch.zeros(1, 9).expand(4, 9)}, ValueError, "logits must not overlap themselves, got str"),
        ({"logits": torch.zeros(99).as_strided((4, 9), (8, 1))}, ValueError, "logits must not overlap themselves"),
        ({"params": 0.7}, TypeError, "params must be a SamplingParams or None, got float"),
        ({"params": sk.SamplingParams(torch.ones(3))}, ValueError, "params.temperature must be [batch=4], got [3]"),
        ({"backend": "fastest"}, ValueError, "backend must be one of"),
    ],
)
def test_refuses(change: dict[str, object], error: type[Exception], message: str) -> None:
    good = {"logits": torch.zeros(4, 9), "params": SCALARS}
    refuses(sk.mask_logits_, good, change, error, f"mask_logits_: {message}")


def test_the_op_itself_refuses_rows_that_overlap(backend: Backend) -> None:
    """Below the public function as well: threads would write what others read."""
    if backend.name in ("cpu", "cuda"):
        x = backend(torch.zeros(1, 9)).expand(4, 9)[:, None]
        with pytest.raises(RuntimeError, match="elements that are written share memory"):
            torch.ops.specdec.mask_logits_(x, None, [1.0, 2, 1, 0, 0])


def test_rows_that_autograd_follows_are_refused(backend: Backend) -> None:
    x = backend(torch.zeros(1, 4)).requires_grad_()
    with pytest.raises(ValueError, match=r"mask_logits_: logits must not require grad \(call it within torch.no_grad"):
        backend.mask_logits_(x, sk.SamplingParams(top_k=2))
    with torch.no_grad():
        backend.mask_logits_(x, sk.SamplingParams(top_k=2))
    assert (x == 0).sum() >= 2


def test_autograd_knows_that_it_was_written_to(backend: Backend) -> None:
    x, weight = backend(torch.randn(1, 4)), backend(torch.ones(1, 4)).requires_grad_()
    product = (weight * x).sum()
    backend.mask_logits_(x, sk.SamplingParams(top_k=2))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_compiles_whole_for_rows_apart_of_sizes_that_change() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x: sk.mask_logits_(x, sk.SamplingParams(top_k=9)), fullgraph=True, backend="aot_eager", dynamic=True
    )
    for batch in (4, 5, 7):
        x = logits(seeded(), batch, 3, 50)
        expected = x.clone()
        sk.mask_logits_(expected[:, 1], sk.SamplingParams(top_k=9))
        with torch._dynamo.config.patch(error_on_recompile=batch > 4):
            compiled(x[:, 1])
        same_memory(x, expected)


def test_a_refused_call_is_no_write_to_autograd() -> None:
    x = torch.zeros(2, 9)
    with pytest.raises(ValueError, match="cuda"):
        sk.mask_logits_(x, None, backend="cuda")
    assert x._version == 0
