"""FlashInfer's sampling functions by their own names and arguments, on this package's ops: change the import.

    from specdec_kernels.integrations import flashinfer as sampling   # was: from flashinfer import sampling

Signatures are those of FlashInfer 0.7.4, and so are in-place outputs, dtypes, padding and `indices`. They run on any
device. Different on purpose, in every function:

- ``deterministic``, ``enable_pdl`` and ``top_k_max`` are accepted and change nothing: results never depend on
  scheduling, and top-k needs no bound.
- The same `seed` and `offset` give the same token in any batch slot where they are tensors with a value for each row.
- `seed` and `offset` are given together or not at all: FlashInfer would ignore one alone.
- Ties at the border of top-k or top-p are all kept, as in `SamplingParams`.
- A row without a usable distribution (no mass, NaN) gives a defined id, and ``return_valid`` says so; `check_nan` looks
  for NaN in what is given, not in its softmax.
- A draft token that its own distribution cannot have produced (0, or a row that does not sum to 1 within 0.01) ends the
  draft before it.
- `output_accepted_token_num` counts the rejected draft token as rejected (its kernel judges that token once more).
- A `top_k` of 0 is off, as one below 0 is. At a `temperature` of 0 a row is one-hot at its argmax (in FlashInfer
  uniform).
- With `indices`, a parameter that is a tensor has one value per row, as in FlashInfer; where there is another number
  of outputs, it may also have one per output. An index that names no row gives −1, which ``return_valid`` says as well.
- Functions that renormalise rows turn one without any mass into zeros.

Rows are read in place and as they are, logits or probabilities: `indices` is `sample`'s `row_index`. (Of float64, and
of probabilities in half precision, a float32 copy is made.) Functions that renormalise rows, and `filter_apply_order`
"joint", copy them. Tokens are made as int64 and cast: for a few integers a row, a second type in every kernel would not
pay.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..backends.reference.law import accept_token
from ..backends.reference.rows import named, slots_upto
from ..checks import (
    FLOAT_DTYPES,
    INT32,
    LOGIT_DTYPES,
    check_flag,
    check_given,
    check_int,
    check_one_of,
    check_tensor,
    contiguous_rows,
    shape_error,
)
from ..ops._common import unchecked
from ..ops.mask_logits_ import mask_logits_
from ..ops.sample import sample
from ..ops.uniform_samples import uniform_samples
from ..ops.verify_chain import verify_chain
from ..ops.warp_probs import warp_probs
from ..sampling import SamplingParams

_LEAST_TOP_P = 2.0**-100
_LARGE = 1e30  # stands for an infinite weight: a row of a million has a sum

__all__ = [
    "chain_speculative_sampling",
    "min_p_sampling_from_probs",
    "sampling_from_logits",
    "sampling_from_probs",
    "softmax",
    "top_k_mask_logits",
    "top_k_renorm_prob",
    "top_k_renorm_probs",
    "top_k_sampling_from_probs",
    "top_k_top_p_sampling_from_logits",
    "top_k_top_p_sampling_from_probs",
    "top_p_renorm_prob",
    "top_p_renorm_probs",
    "top_p_sampling_from_probs",
]

Seed = int | Tensor | None


def softmax(logits: Tensor, temperature: Tensor | float | None = None, enable_pdl: bool | None = None) -> Tensor:
    """``softmax(logits / temperature)``.

    Parameters
    ----------
    logits : Tensor
        ``[batch, vocab]`` float32, float64, bfloat16 or float16.
    temperature : Tensor or float, optional
        A number >= 0 or ``[batch]`` of any floating dtype; None: 1. At 0 a row is one-hot at its argmax. Values of a
        tensor that are below 0 or not finite count as 1.

    Returns
    -------
    Tensor
        ``[batch, vocab]`` float32.

    Raises
    ------
    TypeError, ValueError
        A wrong dtype, shape or temperature.
    """
    vocab, logits = checked_rows("softmax", "logits", logits)
    params = checked_params("softmax", logits, temperature=1.0 if temperature is None else temperature)
    return warp_probs(logits, params)[:, :vocab]


def sampling_from_logits(
    logits: Tensor,
    indices: Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: Seed = None,
    offset: Seed = None,
) -> Tensor:
    """A token from ``softmax(logits)`` of each row.

    Parameters
    ----------
    logits : Tensor
        ``[rows, vocab]`` float32, float64, bfloat16 or float16.
    indices : Tensor, optional
        ``[batch]`` int32 or int64: output i is drawn from row ``indices[i]``, and has this dtype (else int32).
    generator : torch.Generator, optional
        Draws the uniforms where there is no `seed`; None: torch's default generator of the device.
    check_nan : bool
        ValueError where there is a NaN (a host synchronisation).
    seed, offset : int or Tensor, optional
        Both numbers, or both ``[1]`` or ``[batch]`` int64 or uint64 on the device. Change one at every call.

    Returns
    -------
    Tensor
        ``[batch]`` ids.

    Raises
    ------
    TypeError, ValueError
        A wrong dtype, shape, device or range, or NaN under `check_nan`.
    """
    return _draw("sampling_from_logits", "logits", logits, {}, indices, generator, check_nan, seed, offset)[0]


def sampling_from_probs(
    probs: Tensor,
    indices: Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: Seed = None,
    offset: Seed = None,
    return_valid: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """A token from each row of `probs`, ``[rows, vocab]`` float32, float64, bfloat16 or float16 of any positive
    sum (and a number of 2**-126 or more).

    With `return_valid` also ``[batch]`` bool: whether the row had a usable distribution. The rest as in
    `sampling_from_logits`.

    Raises
    ------
    TypeError, ValueError
        A wrong dtype, shape or number.
    """
    op = "sampling_from_probs"
    check_flag(op, "return_valid", return_valid)
    drawn = _draw(op, "probs", probs, {}, indices, generator, check_nan, seed, offset)
    return drawn if return_valid else drawn[0]


def top_p_sampling_from_probs(
    probs: Tensor,
    top_p: Tensor | float,
    indices: Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: Seed = None,
    offset: Seed = None,
    return_valid: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """`sampling_from_probs` after `top_p`, a number or ``[batch]`` float32 (with `indices`: ``[rows]``).

    Raises
    ------
    TypeError, ValueError
        A wrong dtype, shape or number.
    """
    op = "top_p_sampling_from_probs"
    check_flag(op, "return_valid", return_valid)
    drawn = _draw(op, "probs", probs, {"top_p": top_p}, indices, generator, check_nan, seed, offset)
    return drawn if return_valid else drawn[0]


def top_k_sampling_from_probs(
    probs: Tensor,
    top_k: Tensor | int,
    indices: Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: Seed = None,
    offset: Seed = None,
    return_valid: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """`sampling_from_probs` after `top_k`, a number or ``[batch]`` int32 or int64 (with `indices`: ``[rows]``).

    Raises
    ------
    TypeError, ValueError
        A wrong dtype, shape or number.
    """
    op = "top_k_sampling_from_probs"
    check_flag(op, "return_valid", return_valid)
    drawn = _draw(op, "probs", probs, {"top_k": top_k}, indices, generator, check_nan, seed, offset)
    return drawn if return_valid else drawn[0]


def min_p_sampling_from_probs(
    probs: Tensor,
    min_p: Tensor | float,
    indices: Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: Seed = None,
    offset: Seed = None,
    return_valid: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """`sampling_from_probs` after `min_p`, a number or ``[batch]`` float32 (with `indices`: ``[rows]``).

    Raises
    ------
    TypeError, ValueError
        A wrong dtype, shape or number.
    """
    op = "min_p_sampling_from_probs"
    check_flag(op, "return_valid", return_valid)
    drawn = _draw(op, "probs", probs, {"min_p": min_p}, indices, generator, check_nan, seed, offset)
    return drawn if return_valid else drawn[0]


def top_k_top_p_sampling_from_logits(
    logits: Tensor,
    top_k: Tensor | int,
    top_p: Tensor | float,
    indices: Tensor | None = None,
    filter_apply_order: str = "top_k_first",
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: Seed = None,
    offset: Seed = None,
    top_k_max: int | None = None,
) -> Tensor:
    """`sampling_from_logits` after top-k and top-p, each a number or one value per row.

    `filter_apply_order` is "top_k_first" (top-p of what top-k leaves, renormalised: `SamplingParams`' order) or "joint"
    (the ids that both keep of the whole row, which copies the rows, with `indices` those that it names).

    Raises
    ------
    TypeError, ValueError
        A wrong dtype, shape or number.
    """
    op = "top_k_top_p_sampling_from_logits"
    _check_bound(op, top_k_max)
    cuts, joint = {"top_k": top_k, "top_p": top_p}, _is_joint(op, filter_apply_order)
    return _draw(op, "logits", logits, cuts, indices, generator, check_nan, seed, offset, joint)[0]


def top_k_top_p_sampling_from_probs(
    probs: Tensor,
    top_k: Tensor | int,
    top_p: Tensor | float,
    indices: Tensor | None = None,
    filter_apply_order: str = "top_k_first",
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: Seed = None,
    offset: Seed = None,
    return_valid: bool = False,
    top_k_max: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`sampling_from_probs` after top-k and top-p, as in `top_k_top_p_sampling_from_logits`.

    Raises
    ------
    TypeError, ValueError
        A wrong dtype, shape or number.
    """
    op = "top_k_top_p_sampling_from_probs"
    check_flag(op, "return_valid", return_valid)
    _check_bound(op, top_k_max)
    cuts, joint = {"top_k": top_k, "top_p": top_p}, _is_joint(op, filter_apply_order)
    drawn = _draw(op, "probs", probs, cuts, indices, generator, check_nan, seed, offset, joint)
    return drawn if return_valid else drawn[0]


def top_p_renorm_probs(probs: Tensor, top_p: Tensor | float, is_deterministic: bool = False) -> Tensor:
    """The rows of `probs`, ``[batch, vocab]`` float32, float64, bfloat16 or float16, cut by `top_p`, renormalised, as
    float32.

    Raises
    ------
    TypeError, ValueError
        A wrong dtype, shape or number.
    """
    vocab, rows = checked_rows("top_p_renorm_probs", "probs", probs)
    return renormalised(rows, checked_params("top_p_renorm_probs", rows, top_p=top_p))[:, :vocab]


def top_k_renorm_probs(probs: Tensor, top_k: Tensor | int, is_deterministic: bool = False) -> Tensor:
    """The rows of `probs`, ``[batch, vocab]`` float32, bfloat16 or float16, cut by `top_k`, renormalised, in their
    dtype.

    Raises
    ------
    TypeError, ValueError
        A wrong dtype, shape or number.
    """
    vocab, rows = checked_rows("top_k_renorm_probs", "probs", probs, LOGIT_DTYPES)
    params = checked_params("top_k_renorm_probs", rows, top_k=top_k)
    return renormalised(rows, params)[:, :vocab].to(probs.dtype)


def top_k_mask_logits(logits: Tensor, top_k: Tensor | int) -> Tensor:
    """The logits, ``[batch, vocab]`` float32, bfloat16 or float16, with −inf instead of all but the `top_k`
    largest.

    Raises
    ------
    TypeError, ValueError
        A wrong dtype, shape or number.
    """
    vocab, logits = checked_rows("top_k_mask_logits", "logits", logits, LOGIT_DTYPES)
    masked = logits.detach().clone(memory_format=torch.contiguous_format)
    mask_logits_(masked, checked_params("top_k_mask_logits", logits, top_k=top_k))
    return masked[:, :vocab]


def renormalised(probs: Tensor, params: SamplingParams) -> Tensor:
    return warp_probs(_cut(probs.float(), params).log_()).mul_((probs > 0).any(1, keepdim=True))


def _cut(probs: Tensor, params: SamplingParams) -> Tensor:
    """``[batch, vocab]`` float32, with 0 below what is kept. By the probabilities themselves: different ones may have
    one logarithm.
    """
    weights, nothing = probs.detach().nan_to_num(0.0, posinf=_LARGE).clamp_(min=0.0), probs.new_zeros(len(probs))
    with unchecked():
        cutoff = sample(None, params, probs=weights, uniform_samples=nothing).stats.cutoff
    return torch.where(probs < cutoff[:, None], 0.0, probs)


top_p_renorm_prob = top_p_renorm_probs
top_k_renorm_prob = top_k_renorm_probs


def chain_speculative_sampling(
    draft_probs: Tensor,
    draft_token_ids: Tensor,
    target_probs: Tensor,
    maybe_output_accepted_token_num: Tensor | None = None,
    maybe_output_emitted_draft_token_num: Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    seed: Seed = None,
    offset: Seed = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Speculative sampling of chains (Chen et al., arXiv 2302.01318): `verify_chain` with acceptance "token".

    Parameters
    ----------
    draft_probs : Tensor
        ``[batch, num_draft, vocab]`` float32, float64, bfloat16 or float16, what the draft tokens were drawn from.
    draft_token_ids : Tensor
        ``[batch, num_draft]`` int32 or int64.
    target_probs : Tensor
        ``[batch, num_draft + 1, vocab]`` float32, float64, bfloat16 or float16, sampling parameters already in them.
    maybe_output_accepted_token_num, maybe_output_emitted_draft_token_num : Tensor, optional
        ``[batch]`` int32, to which the counts are added in place; None: zeros.
    generator, seed, offset : optional
        As in `sampling_from_logits`; change `seed` or `offset` at every verify step.

    Returns
    -------
    tuple of Tensor
        ``[batch, num_draft + 1]`` int32 tokens, padded with −1; how many draft tokens would be accepted each on its own
        (those after a rejection too, by their rows as given, not divided by their sums); how many were emitted, the
        token after them not counted. A row that is unusable gives a defined id, which ends the sequence's tokens.

    Raises
    ------
    TypeError, ValueError
        A wrong dtype, shape, device or range.
    """
    op = "chain_speculative_sampling"
    check_tensor(op, "target_probs", target_probs, FLOAT_DTYPES, None)
    check_tensor(op, "draft_probs", draft_probs, FLOAT_DTYPES, target_probs.device)
    target_probs, draft_probs = target_probs.float(), draft_probs.float()
    check_tensor(op, "draft_token_ids", draft_token_ids, (torch.int32, torch.int64), target_probs.device)
    if target_probs.dim() != 3 or min(target_probs.shape[1:]) < 1:
        raise shape_error(op, "target_probs", "[batch, num_draft + 1, vocab >= 1]", target_probs)
    batch, rows, vocab = target_probs.shape
    if draft_probs.shape != (batch, rows - 1, vocab):
        raise shape_error(op, "draft_probs", f"[batch={batch}, num_draft={rows - 1}, vocab={vocab}]", draft_probs)
    if draft_token_ids.shape != (batch, rows - 1):
        raise shape_error(op, "draft_token_ids", f"[batch={batch}, num_draft={rows - 1}]", draft_token_ids)
    for name, counts_so_far in (
        ("maybe_output_accepted_token_num", maybe_output_accepted_token_num),
        ("maybe_output_emitted_draft_token_num", maybe_output_emitted_draft_token_num),
    ):
        if counts_so_far is not None:
            check_given(op, name, counts_so_far, INT32, target_probs.device, ("batch",), (batch,))
    target_probs, draft_probs = contiguous_rows(target_probs), contiguous_rows(draft_probs)
    if vocab == 1:
        target_probs, draft_probs = (torch.nn.functional.pad(t, (0, 1)) for t in (target_probs, draft_probs))
    coins = _uniforms(op, batch, rows, generator, seed, offset, target_probs.device)
    out = verify_chain(None, draft_token_ids, target_probs=target_probs, draft_probs=draft_probs, uniform_samples=coins)
    ids = draft_token_ids.long().clamp(0, vocab - 1)[..., None]
    p, q = (t[:, : rows - 1].gather(-1, ids)[..., 0] for t in (target_probs, draft_probs))
    after = slots_upto(rows - 1, out.num_accepted) > out.num_accepted[:, None]  # these no one has judged yet
    alone = after & accept_token(coins[:, 1:], p, q) & (ids[..., 0] == draft_token_ids) & (q > 0)
    counts = []
    for given, count in (
        (maybe_output_accepted_token_num, out.num_accepted + alone.sum(1, dtype=torch.int32)),
        (maybe_output_emitted_draft_token_num, out.num_accepted),
    ):
        counts.append(count if given is None else given.add_(count))
    return out.tokens.int(), counts[0], counts[1]


def _check_bound(op: str, top_k_max: int | None) -> None:
    if top_k_max is not None and not isinstance(top_k_max, np.integer):
        check_int(op, "top_k_max", top_k_max, -(2**63), None)


def _is_joint(op: str, order: str) -> bool:
    """Whether top-k and top-p each look at the whole row."""
    check_one_of(op, "filter_apply_order", order, ("top_k_first", "joint"))
    return order == "joint"


def checked_params(op: str, rows: Tensor, **values: Tensor | float) -> SamplingParams:
    """The parameters for `rows`, of any rank; errors name `op`'s own arguments.

    Wrong shapes are reported in FlashInfer's words: its tests match them, so callers may.
    """
    for name, value in values.items():
        if isinstance(value, (np.floating, np.integer)):
            values[name] = value.item()
        elif isinstance(value, Tensor):
            if value.dim() != 1:
                shape, got = (
                    (" of shape (batch_size,)", "0-dimensional") if value.dim() == 0 else ("", f"{value.dim()}D")
                )
                raise ValueError(
                    f"{op}: {name}: Expected a 1D tensor{shape} or scalar for the sampling parameter, "
                    f"but got a {got} tensor"
                )
            if value.device != rows.device:
                raise ValueError(f"{op}: {name} must be on {rows.device}, got {value.device}")
            if len(value) != len(rows):
                raise ValueError(
                    f"{op}: {name}: Sampling parameter tensor batch size mismatch: expected length {len(rows)}, "
                    f"but got length {len(value)}"
                )
            if value.layout is not torch.strided or value.is_quantized:
                raise TypeError(f"{op}: {name} must be a strided tensor of numbers, got {value.layout} {value.dtype}")
    if "top_p" in values:
        values["top_p"] = _of_the_largest(values["top_p"])
    if isinstance(top_k := values.get("top_k"), Tensor) and top_k.is_floating_point():
        values["top_k"] = top_k.long()
    try:
        return SamplingParams(**values)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise type(error)(f"{op}: {str(error).removeprefix('SamplingParams: ')}") from None


def _of_the_largest(top_p: Tensor | float) -> Tensor | float:
    """`top_p` with 0, which is "off" in `SamplingParams`, replaced by a number that keeps only the largest."""
    if isinstance(top_p, Tensor):
        if top_p.is_complex():
            return top_p
        top_p = top_p.float()
        return torch.where(top_p == 0, _LEAST_TOP_P, top_p)
    return _LEAST_TOP_P if isinstance(top_p, (int, float)) and top_p == 0 and top_p is not False else top_p


def _draw(
    op: str,
    name: str,
    given: Tensor,
    cuts: dict[str, Tensor | float],
    indices: Tensor | None,
    generator: torch.Generator | None,
    check_nan: bool,
    seed: Seed,
    offset: Seed,
    joint: bool = False,
) -> tuple[Tensor, Tensor]:
    """Tokens, and whether their rows were usable; `given` are logits, or by the name "probs" probabilities."""
    _, given = checked_rows(op, name, given)
    if name == "probs":
        given = given.float()
    check_flag(op, "check_nan", check_nan)
    if check_nan and bool(given.isnan().any()):
        raise ValueError(f"{op}: {name} must hold no NaN, got {int(given.isnan().sum())}")
    if indices is not None:
        check_tensor(op, "indices", indices, (torch.int32, torch.int64), given.device)
        if indices.dim() != 1:
            raise shape_error(op, "indices", "[batch]", indices)
    rows = given if indices is None else indices
    if indices is not None and len(given) > 0:  # of rows, where there is a value for each
        of_rows = indices.long().clamp(0, len(given) - 1)
        cuts = {
            cut: value[of_rows]
            if isinstance(value, Tensor)
            and value.layout is torch.strided
            and not value.is_quantized
            and value.shape == given.shape[:1]
            and value.device == given.device
            else value
            for cut, value in cuts.items()
        }
    params = checked_params(op, rows, **cuts)
    uniforms = _uniforms(op, len(rows), 1, generator, seed, offset, given.device)[:, 0]
    of_probs, index = name == "probs", indices
    if joint:  # the top-k of what top-p of the whole row keeps: both keep the largest
        if indices is None:
            given = given.detach() if of_probs else given.detach().clone(memory_format=torch.contiguous_format)
        else:
            given, none = named(given.detach(), indices)
            index = torch.where(none, -1, slots_upto(len(none), none))
        top_p, params = checked_params(op, rows, top_p=cuts["top_p"]), checked_params(op, rows, top_k=cuts["top_k"])
        if of_probs:
            given = _cut(given, top_p)
        else:
            mask_logits_(given, top_p)
    drawn = sample(
        None if of_probs else given, params, probs=given if of_probs else None, row_index=index,
        uniform_samples=uniforms,
    )  # fmt: skip
    return drawn.token.to(torch.int32 if indices is None else indices.dtype), drawn.stats.status == 0


def checked_rows(
    op: str, name: str, rows: Tensor, dtypes: tuple[torch.dtype, ...] = FLOAT_DTYPES
) -> tuple[int, Tensor]:
    """How many ids there are, and the rows as the ops take them: no float64, contiguous in the last dimension, and a
    second, impossible id beside a lone one.
    """
    check_tensor(op, name, rows, dtypes, None)
    if rows.dim() != 2 or rows.shape[1] < 1:
        raise shape_error(op, name, "[batch, vocab >= 1]", rows)
    vocab = rows.shape[1]
    rows = contiguous_rows(rows.float() if rows.dtype == torch.float64 else rows)
    if vocab == 1:
        rows = torch.nn.functional.pad(rows, (0, 1), value=0.0 if name == "probs" else -torch.inf)
    return vocab, rows


def _uniforms(
    op: str, rows: int, num: int, generator: torch.Generator | None, seed: Seed, offset: Seed, device: torch.device
) -> Tensor:
    """``[rows, num]``: of each row's own seed, else of one stream for all."""
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(f"{op}: generator must be a torch.Generator or None, got {type(generator).__name__}")
    if generator is not None and generator.device.type != device.type:
        raise ValueError(f"{op}: generator must be of {device.type}, got one of {generator.device.type}")
    if (seed is None) != (offset is None):
        raise ValueError(f"{op}: seed and offset must be given together, got one of them")
    if seed is None or offset is None:
        return torch.rand(rows, num, generator=generator, dtype=torch.float64, device=device)
    seeds, steps = _numbers(op, "seed", seed, rows, device), _numbers(op, "offset", offset, rows, device)
    if isinstance(seed, Tensor) != isinstance(offset, Tensor):
        raise ValueError(f"{op}: seed and offset must both be tensors or both be numbers, got one of each")
    if len(seeds) == len(steps) == 1:
        return uniform_samples(seeds, steps, rows * num, "sample").view(rows, num)
    return uniform_samples(seeds.expand(rows).contiguous(), steps.expand(rows).contiguous(), num, "sample")


def _numbers(op: str, name: str, value: int | Tensor, rows: int, device: torch.device) -> Tensor:
    """``[1]`` or ``[rows]`` int64: 64 bits, whatever sign they were given with."""
    if isinstance(value, Tensor):
        check_tensor(op, name, value, (torch.int64, torch.uint64), device)
        if value.dim() != 1 or len(value) not in (1, rows):
            raise shape_error(op, name, f"[1] or [batch={rows}]", value)
        return value.view(torch.int64)
    value = value.item() if isinstance(value, np.integer) else value
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{op}: {name} must be an integer or a tensor, got {type(value).__name__}")
    return torch.full((1,), (value + 2**63) % 2**64 - 2**63, dtype=torch.int64, device=device)
