"""FlashInfer's functions by its names: distributions, outputs in place, and what differs on purpose."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import specdec_kernels as sk
from python_tests.law.cases import check_law, problem
from python_tests.ops.inputs import Widest
from specdec_kernels.integrations import flashinfer
from specdec_kernels.testing import float64_law

VOCAB = 11
GRID = 20_000


@pytest.fixture
def uniforms(monkeypatch: pytest.MonkeyPatch) -> Callable[[Tensor], None]:
    """What is drawn with from now on."""

    def use(numbers: Tensor) -> None:
        monkeypatch.setattr(flashinfer, "_uniforms", lambda op, rows, num, *_: numbers.reshape(rows, num))

    return use


@pytest.mark.parametrize("kind", ["full", "given_probabilities"])
def test_chains_have_the_targets_distribution(uniforms: Callable[[Tensor], None], kind: str) -> None:
    def verify(target: Tensor, tokens: Tensor, **given: Any) -> sk.VerifyOutput:
        uniforms(given["uniform_samples"])
        draft = given["draft_logits"].softmax(-1) if kind == "full" else given["draft_probs"]
        out, _, emitted = flashinfer.chain_speculative_sampling(draft, tokens.int(), target.softmax(-1))
        return sk.VerifyOutput(out.long(), emitted, emitted + 1, torch.zeros_like(emitted))

    check_law(verify, problem(kind, 3, 2), "token")


def test_chains_count_in_place(uniforms: Callable[[Tensor], None]) -> None:
    """The first draft token is refused; of the two after it the last would have been accepted."""
    target = torch.tensor([[0.0, 0.5, 0.5], [0.2, 0.7, 0.1], [0.5, 0.5, 0.0], [1.0, 0.0, 0.0]])[None]
    draft = torch.full((1, 3, 3), 1 / 3)
    accepted, emitted = torch.tensor([10], dtype=torch.int32), torch.tensor([20], dtype=torch.int32)
    uniforms(torch.tensor([[0.9, 0.5, 0.5, 0.5]]))
    tokens, *counts = flashinfer.chain_speculative_sampling(
        draft, torch.tensor([[0, 2, 1]], dtype=torch.int32), target, accepted, emitted
    )
    assert tokens.tolist() == [[2, -1, -1, -1]] and tokens.dtype == torch.int32
    assert counts[0] is accepted and counts[1] is emitted
    assert (accepted.item(), emitted.item()) == (11, 20)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_of_one_draft_token_as_many_are_accepted_as_emitted(dtype: torch.dtype) -> None:
    """Also where rows do not sum to 1, as in half precision, or the token is none or its probability 0."""
    rng = torch.Generator().manual_seed(0)
    target, draft = (torch.rand(20_000, n, 4, generator=rng) for n in (2, 1))
    target, draft = target / target.sum(-1, keepdim=True), draft / draft.sum(-1, keepdim=True)
    target[:5_000] *= 0.5
    draft[5_000:10_000, :, 0] = 0
    draft[10_000:, :, 0] += 1 - draft[10_000:].sum(-1)
    tokens = torch.randint(-1, 4, (20_000, 1), generator=rng, dtype=torch.int32)
    _, accepted, emitted = flashinfer.chain_speculative_sampling(
        draft.to(dtype), tokens, target.to(dtype), generator=rng
    )
    assert torch.equal(accepted, emitted) and 0.3 < emitted.float().mean() < 0.8
    assert not emitted[tokens[:, 0] < 0].any()


def test_rows_of_float64_and_of_one_id() -> None:
    probs, logits = rows().softmax(-1), rows()
    numbers: dict[str, Any] = {"seed": 1, "offset": 2}
    for call in (flashinfer.sampling_from_probs, flashinfer.top_p_renorm_probs):
        given = (0.8,) if call is flashinfer.top_p_renorm_probs else ()
        named = {} if given else numbers
        assert torch.equal(call(probs.double(), *given, **named), call(probs, *given, **named))
    assert torch.equal(flashinfer.softmax(logits.double()), flashinfer.softmax(logits))
    least = torch.full((3,), 1e-50, dtype=torch.float64)
    assert torch.equal(flashinfer.top_p_renorm_probs(probs, least), flashinfer.top_p_renorm_probs(probs, 1e-50))
    one = torch.ones(3, 1)
    for renormalised in (
        flashinfer.softmax(one * 7), flashinfer.top_p_renorm_probs(one, 0.5), flashinfer.top_k_renorm_probs(one, 1),
        flashinfer.top_k_mask_logits(one, 1),
    ):  # fmt: skip
        assert renormalised.tolist() == [[1.0]] * 3
    for drawn in (
        flashinfer.sampling_from_probs(one), flashinfer.sampling_from_logits(one),
        flashinfer.top_k_top_p_sampling_from_logits(one, 1, 0.5, filter_apply_order="joint"),
        flashinfer.min_p_sampling_from_probs(one, 0.3, torch.tensor([0, 2, 1])),
    ):  # fmt: skip
        assert drawn.tolist() == [0] * 3
    tokens, *counts = flashinfer.chain_speculative_sampling(one[:, None], torch.zeros(3, 1).int(), torch.ones(3, 2, 1))
    assert tokens.tolist() == [[0, 0]] * 3 and [count.tolist() for count in counts] == [[1] * 3] * 2


def rows(num: int = 3) -> Tensor:
    return torch.randn(num, VOCAB, generator=torch.Generator().manual_seed(num)) * 2


def frequencies(draw: Callable[..., Any], given: Tensor, *parameters: Any, **more: Any) -> Tensor:
    """Of the ids that each row gives over a grid of uniforms, through `indices`."""
    num = len(given)
    index = torch.arange(num).repeat_interleave(GRID)
    spread = [p.repeat_interleave(GRID) if isinstance(p, Tensor) else p for p in parameters]
    tokens = draw(given, *spread, indices=index, **more)
    return torch.stack([torch.bincount(t, minlength=VOCAB) / GRID for t in tokens.view(num, GRID)])


TOP_K, TOP_P, MIN_P = torch.tensor([3, 5, 8]), torch.tensor([0.5, 0.8, 0.95]), torch.tensor([0.3, 0.1, 0.02])
DRAWN: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "sampling_from_logits": ((), {}),
    "sampling_from_probs": ((), {}),
    "top_k_sampling_from_probs": ((TOP_K,), {"top_k": TOP_K}),
    "top_p_sampling_from_probs": ((TOP_P,), {"top_p": TOP_P}),
    "min_p_sampling_from_probs": ((MIN_P,), {"min_p": MIN_P}),
    "top_k_top_p_sampling_from_logits": ((TOP_K, TOP_P), {"top_k": TOP_K, "top_p": TOP_P}),
    "top_k_top_p_sampling_from_probs": ((4, 0.7), {"top_k": 4, "top_p": 0.7}),
}


@pytest.mark.parametrize("name", DRAWN)
def test_draws_have_the_distribution_asked_for(uniforms: Callable[[Tensor], None], name: str) -> None:
    parameters, params = DRAWN[name]
    given = rows() if name.endswith("logits") else rows().softmax(-1)
    uniforms(((torch.arange(GRID) + 0.5) / GRID).repeat(3))
    expected = float64_law(rows(), sk.SamplingParams(**params))
    found = frequencies(getattr(flashinfer, name), given, *parameters)
    torch.testing.assert_close(found.double(), torch.as_tensor(expected), atol=VOCAB / GRID, rtol=0)


@pytest.mark.parametrize("form", ["logits", "probs"])
def test_joint_top_k_and_top_p_look_at_the_whole_row(uniforms: Callable[[Tensor], None], form: str) -> None:
    """Of 0.4, 0.3, 0.2, 0.1 top-k 2 leaves two; top-p 0.55 the first alone of these, but both of all."""
    probs = torch.tensor([[0.4, 0.3, 0.2, 0.1] + [0.0] * (VOCAB - 4)])
    given, draw = probs, flashinfer.top_k_top_p_sampling_from_probs
    if form == "logits":
        given, draw = probs.log(), flashinfer.top_k_top_p_sampling_from_logits  # type: ignore[assignment]
    uniforms((torch.arange(GRID) + 0.5) / GRID)
    joint = frequencies(draw, given, 2, 0.55, filter_apply_order="joint")[0]
    torch.testing.assert_close(joint[:3], torch.tensor([4 / 7, 3 / 7, 0.0]), atol=2 / GRID, rtol=0)
    assert torch.equal(frequencies(draw, given, 3, 0.65, filter_apply_order="joint")[0], joint)
    first = frequencies(draw, given, 2, 0.55, filter_apply_order="top_k_first")[0]
    assert first[0] == 1
    with pytest.raises(ValueError, match="filter_apply_order must be one of top_k_first, joint, got 'top_p'"):
        draw(given, 2, 0.55, filter_apply_order="top_p")


def test_neighbouring_numbers_are_no_ties(uniforms: Callable[[Tensor], None]) -> None:
    """Sixteen floats in a row have but ten logarithms or so in float32."""
    first = torch.tensor(1 / 16).view(torch.int32)
    probs = (first + torch.arange(16, dtype=torch.int32)).view(torch.float32)[None]
    uniforms((torch.arange(GRID) + 0.5) / GRID)
    for k in range(1, 16):
        cut = flashinfer.top_k_renorm_probs(probs, k)
        assert int((cut > 0).sum()) == k
        drawn = [
            frequencies(flashinfer.top_k_top_p_sampling_from_probs, probs, k, 1.0, filter_apply_order=order)[0]
            for order in ("joint", "top_k_first")
        ]
        assert torch.equal(*drawn) and torch.equal(drawn[0] > 0, cut[0] > 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_renormalised_and_masked_rows(dtype: torch.dtype) -> None:
    logits = rows().to(dtype)
    probs = logits.float().softmax(-1)
    kept = flashinfer.top_k_mask_logits(logits, TOP_K)
    assert kept.dtype == dtype and (kept.isfinite().sum(-1) >= TOP_K).all()
    assert torch.equal(kept[kept.isfinite()], logits[kept.isfinite()])
    cut = flashinfer.top_k_renorm_probs(probs.to(dtype), TOP_K.int())
    expected = float64_law(probs.to(dtype).float().log(), sk.SamplingParams(top_k=TOP_K))
    assert cut.dtype == dtype
    torch.testing.assert_close(cut.double(), torch.as_tensor(expected), atol=float(torch.finfo(dtype).eps), rtol=0)
    expected = float64_law(probs.log(), sk.SamplingParams(top_p=TOP_P))
    found = flashinfer.top_p_renorm_probs(probs, TOP_P)
    torch.testing.assert_close(found.double(), torch.as_tensor(expected), atol=1e-6, rtol=0)
    for temperature in (None, 0.7, torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)):
        scale = temperature[:, None] if isinstance(temperature, Tensor) else temperature or 1.0
        expected = (logits.double() / scale).softmax(-1)
        found = flashinfer.softmax(logits, temperature)
        torch.testing.assert_close(found.double(), expected, atol=1e-6, rtol=0)


def test_of_a_row_without_mass_nothing_is_left() -> None:
    probs = torch.stack([torch.zeros(VOCAB), rows(1)[0].softmax(-1)])
    for cut in (flashinfer.top_k_renorm_prob(probs, 3), flashinfer.top_p_renorm_prob(probs, 0.5)):
        assert cut[0].count_nonzero() == 0 and abs(float(cut[1].sum()) - 1) < 1e-6


SEEDED: dict[str, Any] = {"seed": 3, "offset": 0}


@pytest.mark.parametrize(
    "call",
    [
        lambda x: flashinfer.sampling_from_logits(x, **SEEDED), lambda x: flashinfer.softmax(x),
        lambda x: flashinfer.top_k_mask_logits(x, 3), lambda x: flashinfer.top_p_renorm_probs(x.softmax(-1), 0.5),
        lambda x: flashinfer.top_k_renorm_probs(x.softmax(-1), 2),
        lambda x: flashinfer.top_k_top_p_sampling_from_logits(x, 4, 0.8, **SEEDED, filter_apply_order="joint"),
        lambda x: flashinfer.top_k_top_p_sampling_from_probs(
            x.softmax(-1), 4, 0.8, torch.tensor([2, 0]), **SEEDED, filter_apply_order="joint"
        ),
        lambda x: flashinfer.chain_speculative_sampling(
            x.softmax(-1)[None, :2], torch.tensor([[1, 2]]), x.softmax(-1)[None], **SEEDED
        )[0],
    ],
)  # fmt: skip
def test_rows_in_any_order_of_memory_and_of_a_model_that_trains(call: Callable[[Tensor], Tensor]) -> None:
    logits = rows()
    apart = logits.T.contiguous().T
    assert apart.stride() == (1, len(logits))
    wanted = call(logits)
    assert torch.equal(call(apart), wanted) and torch.equal(call(logits.clone().requires_grad_()), wanted)


def test_numbers_may_be_numpys() -> None:
    probs = rows().softmax(-1)
    found = flashinfer.top_k_top_p_sampling_from_probs(
        probs, np.int64(4), np.float32(0.8), seed=np.int64(3), offset=np.int64(1)
    )
    assert torch.equal(
        found, flashinfer.top_k_top_p_sampling_from_probs(probs, 4, float(np.float32(0.8)), seed=3, offset=1)
    )


def test_seeds_name_the_numbers() -> None:
    """Wherever a row stands; every offset, seed and row of one stream has its own."""
    probs = rows(1).softmax(-1).expand(64, -1).contiguous()
    seeds, offsets = torch.arange(64) % 4, torch.arange(64) // 4
    draw = flashinfer.sampling_from_probs
    first = draw(probs, seed=seeds, offset=offsets)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(draw(probs, seed=seeds[order].view(torch.uint64), offset=offsets[order]), first[order])  # type: ignore[index]
    assert len(first.unique()) > 3  # type: ignore[union-attr]
    one = draw(probs, seed=7, offset=3)
    assert torch.equal(one, draw(probs, seed=torch.tensor([7]), offset=torch.tensor([3])))  # type: ignore[arg-type]
    assert not torch.equal(one, draw(probs, seed=7, offset=4)) and len(one.unique()) > 3  # type: ignore[arg-type, union-attr]
    again = [draw(probs, generator=torch.Generator().manual_seed(5)) for _ in range(2)]
    assert torch.equal(*again)  # type: ignore[arg-type]
    assert torch.equal(draw(probs[:2], seed=2**64 - 1, offset=0), draw(probs[:2], seed=-1, offset=0))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [*DRAWN, "joint"])
def test_rows_named_by_indices_are_read_where_they_are(name: str) -> None:
    parameters, _ = DRAWN.get(name, ((TOP_K, TOP_P), {}))
    draw = getattr(flashinfer, "top_k_top_p_sampling_from_logits" if name == "joint" else name)
    given = rows() if name.endswith("logits") or name == "joint" else rows().softmax(-1)
    index = torch.arange(7, dtype=torch.int32) % 3
    each = [p[index] if isinstance(p, Tensor) else p for p in parameters]
    options: dict[str, Any] = {"seed": torch.arange(7), "offset": torch.arange(7)}
    if name == "joint":
        options["filter_apply_order"] = "joint"
    with Widest() as made:
        tokens = draw(given, *each, indices=index, **options)
    assert tokens.dtype == torch.int32 and (name == "joint" or made.most < len(index) * VOCAB)
    assert torch.equal(tokens, draw(given[index], *each, **options))
    assert draw(given, *[p[:0] if isinstance(p, Tensor) else p for p in each], indices=index[:0]).shape == (0,)


@pytest.mark.parametrize("name", ["top_k_top_p_sampling_from_logits", "top_k_top_p_sampling_from_probs"])
def test_a_bound_of_top_k_changes_nothing(name: str) -> None:
    """Also one that is too low, by which FlashInfer may cut."""
    given = rows(3) if name.endswith("logits") else rows(3).softmax(-1)
    draw = functools.partial(getattr(flashinfer, name), given, torch.tensor([4, 5, 6]), 0.9, seed=7, offset=3)
    assert torch.equal(draw(top_k_max=1), draw())


def test_with_indices_parameters_are_of_rows() -> None:
    """Of as many outputs, too: else they may be of outputs."""
    swapped = torch.tensor([1, 0])
    probs, top_k = torch.tensor([[0.4, 0.6], [0.3, 0.7]]), torch.tensor([1, 2])
    drawn = torch.stack([flashinfer.top_k_sampling_from_probs(probs, top_k, swapped) for _ in range(40)])
    assert [len(column.unique()) for column in drawn.T] == [2, 1]


def test_with_indices_parameters_may_be_of_outputs_where_these_are_others() -> None:
    probs, index = rows(2).softmax(-1), torch.tensor([1, 0, 0, 1, 1])
    top_p, top_k = torch.tensor([0.3, 0.9]), torch.tensor([2, 5])
    options: dict[str, Any] = {"indices": index, "seed": torch.arange(5), "offset": torch.arange(5)}
    for order in ("joint", "top_k_first"):
        options["filter_apply_order"] = order
        draw: Callable[..., Any] = functools.partial(flashinfer.top_k_top_p_sampling_from_probs, probs, **options)
        assert torch.equal(draw(top_k, top_p), draw(top_k[index], top_p[index]))
    with pytest.raises(ValueError, match="expected length 5, but got length 3"):
        flashinfer.top_p_sampling_from_probs(probs, torch.ones(3), indices=index)


@pytest.mark.parametrize("name", [*DRAWN, "joint"])
def test_an_index_that_names_no_row_gives_none(name: str) -> None:
    parameters, _ = DRAWN.get(name, ((TOP_K, TOP_P), {}))
    draw = getattr(flashinfer, "top_k_top_p_sampling_from_logits" if name == "joint" else name)
    given = rows() if name.endswith("logits") or name == "joint" else rows().softmax(-1)
    index = torch.tensor([0, len(given), 2, -1])
    options: dict[str, Any] = {"filter_apply_order": "joint"} if name == "joint" else {}
    each = [p[index % len(p)] if isinstance(p, Tensor) else p for p in parameters]
    tokens = draw(given, *each, indices=index, seed=7, offset=3, **options)
    assert tokens[1] == tokens[3] == -1 and bool((tokens[::2] >= 0).all())


def test_rows_without_a_distribution_are_said() -> None:
    probs = torch.stack([torch.zeros(VOCAB), torch.full((VOCAB,), torch.nan), rows(1)[0].softmax(-1)])
    tokens, valid = flashinfer.sampling_from_probs(probs, return_valid=True)
    assert valid.tolist() == [False, False, True]
    assert ((tokens >= 0) & (tokens < VOCAB)).all() and tokens[1] == 0
    with pytest.raises(ValueError, match="sampling_from_probs: probs must hold no NaN, got 11"):
        flashinfer.sampling_from_probs(probs, check_nan=True)


def test_an_index_that_names_no_row_is_said() -> None:
    tokens, valid = flashinfer.sampling_from_probs(rows().softmax(-1), torch.tensor([3, 0, -1]), return_valid=True)
    assert valid.tolist() == [False, True, False]
    assert tokens[0] == tokens[2] == -1 and tokens[1] >= 0


def test_dtypes_of_ids() -> None:
    probs = rows().softmax(-1)
    assert flashinfer.sampling_from_probs(probs).dtype == torch.int32  # type: ignore[union-attr]
    drawn = flashinfer.sampling_from_probs(probs, torch.tensor([2, 2, 0, 1]))
    assert drawn.dtype == torch.int64 and drawn.shape == (4,)  # type: ignore[union-attr]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_probabilities_in_half_precision(dtype: torch.dtype) -> None:
    probs = rows().softmax(-1).to(dtype)
    seeded: dict[str, Any] = {"seed": 3, "offset": 0}
    for draw, cut in (
        (flashinfer.sampling_from_probs, ()), (flashinfer.top_p_sampling_from_probs, (0.7,)),
        (flashinfer.min_p_sampling_from_probs, (0.1,)), (flashinfer.top_k_sampling_from_probs, (2,)),
    ):  # fmt: skip
        assert torch.equal(draw(probs, *cut, **seeded), draw(probs.float(), *cut, **seeded))
    cut = flashinfer.top_p_renorm_probs(probs, 0.7)
    assert cut.dtype == torch.float32 and torch.equal(cut, flashinfer.top_p_renorm_probs(probs.float(), 0.7))
    chain = probs[None]
    found, expected = (
        flashinfer.chain_speculative_sampling(p[:, :2], torch.tensor([[0, 1]]), p, **seeded)
        for p in (chain, chain.float())
    )
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_borders_of_top_k_and_top_p() -> None:
    """A top-p of 0 leaves the likeliest alone; a float tensor of top-k's is taken for integers."""
    probs = rows().softmax(-1)
    for none in (0.0, 0, torch.zeros(len(probs)), torch.zeros(len(probs), dtype=torch.float16)):
        assert torch.equal(flashinfer.top_p_renorm_probs(probs, none).argmax(1), probs.argmax(1))
        assert ((flashinfer.top_p_renorm_probs(probs, none) > 0).sum(1) == 1).all()
    of_floats = flashinfer.top_k_renorm_probs(probs, torch.full((len(probs),), 2.0))
    assert torch.equal(of_floats, flashinfer.top_k_renorm_probs(probs, 2))
    assert torch.equal(flashinfer.top_k_renorm_probs(probs, 0), flashinfer.top_k_renorm_probs(probs, -1))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: flashinfer.softmax([1.0]), "softmax: logits must be a tensor, got list"),
        (lambda: flashinfer.softmax(torch.zeros(3)), r"softmax: logits must be \[batch, vocab >= 1\], got \[3\]"),
        (lambda: flashinfer.sampling_from_probs(rows().long()), "probs must be float16 or .* float64, got int64"),
        (lambda: flashinfer.top_k_renorm_probs(rows().double(), 3), "probs must be float32 or bfloat16 or float16"),
        (lambda: flashinfer.sampling_from_probs(rows(), seed=3), "seed and offset must be given together, got one of"),
        (lambda: flashinfer.sampling_from_probs(rows(), seed=3, offset=torch.tensor([1])), "must both be tensors"),
        (lambda: flashinfer.sampling_from_probs(rows(), seed=torch.arange(2), offset=torch.arange(2)),
         r"sampling_from_probs: seed must be \[1\] or \[batch=3\], got \[2\]"),
        (lambda: flashinfer.sampling_from_probs(rows(), torch.zeros(1, 1, dtype=torch.int64)), "indices must be"),
        (lambda: flashinfer.min_p_sampling_from_probs(rows(), torch.tensor(0.1)),
         r"min_p: Expected a 1D tensor of shape \(batch_size,\) or scalar .*, but got a 0-dimensional tensor"),
        (lambda: flashinfer.top_p_renorm_probs(rows(), torch.zeros(3, 1)),
         "top_p_renorm_probs: top_p: Expected a 1D tensor or scalar .*, but got a 2D tensor"),
        (lambda: flashinfer.top_k_sampling_from_probs(rows(), torch.ones(4).int(), torch.arange(2)),
         "top_k: Sampling parameter tensor batch size mismatch: expected length 2, but got length 4"),
        (lambda: flashinfer.chain_speculative_sampling(torch.zeros(1, 2, 5), torch.zeros(1, 2).int(),
                                                       torch.zeros(1, 4, 5)),
         r"chain_speculative_sampling: draft_probs must be \[batch=1, num_draft=3, vocab=5\], got \[1, 2, 5\]"),
    ],
)  # fmt: skip
def test_what_is_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        call()
