"""`sample`: tokens from raw logits, by inverse CDF or by Gumbel noise."""

from __future__ import annotations

import torch
from torch import Tensor

from ..checks import (
    ID_DTYPES,
    INT64,
    UNIFORM_DTYPES,
    check_given,
    check_instance,
    check_int,
    check_shape,
    check_tensor,
    shape_error,
)
from ..processors import Processors
from ..sampling import SamplingParams
from ..types import Draw, RowStats, TokenMap
from ._common import check_beside_probs, check_params, check_processors, check_rows, define, dispatch, raise_for_status
from .arguments import SampleArguments

MAX_SAMPLES = 1024  # drawn from a row; csrc/bind_ops.h has the same number


def _fake(args: SampleArguments) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    logits, index = args.logits, args.row_index
    rows = (*(logits if index is None else index).shape[:1], *logits.shape[1:-1])
    drawn = rows if args.num_samples == 1 else (*rows, args.num_samples)
    return (
        logits.new_empty(drawn, dtype=torch.int64),
        logits.new_empty(drawn, dtype=torch.float32),
        logits.new_empty((*rows, 6), dtype=torch.float32),
        logits.new_empty(rows, dtype=torch.int64),
        logits.new_empty(rows, dtype=torch.int32),
    )


_op, _call = define(
    "sample", SampleArguments, "(Tensor token, Tensor log_prob, Tensor values, Tensor argmax, Tensor status)", _fake
)


def sample(
    logits: Tensor | None,
    params: SamplingParams | None = None,
    *,
    probs: Tensor | None = None,
    row_index: Tensor | None = None,
    processors: Processors | None = None,
    uniform_samples: Tensor | None = None,
    noise_keys: Tensor | None = None,
    num_samples: int = 1,
    draft_token_map: TokenMap | None = None,
    backend: str | None = None,
) -> Draw:
    """Draw from the distribution of each row, and keep the row's stats for the verifier.

    With `uniform_samples` by inverse CDF; with `noise_keys` by the Gumbel-max trick, ``argmax_v(log P(v) + G(key,
    v))``, where ``num_samples > 1`` takes the largest ones: a draw without replacement (Kool et al. 2019, arXiv
    1903.06059). A greedy row (temperature 0) yields its argmax either way. Rows with the same key share their noise:
    each node of a tree needs a key of its own.

    Parameters
    ----------
    logits : Tensor or None
        ``[batch, vocab]`` or ``[batch, n, vocab]`` float32, bfloat16 or float16, contiguous in the last dimension.
    params : SamplingParams, optional
        None: temperature 1, nothing cut.
    probs : Tensor, optional
        Instead of `logits` (None): the same as float32 probabilities, of any sum > 0. `params` cut them by top-k,
        top-p and min-p; their temperature must be the number 1, or 0 for the likeliest id. Not with `processors`,
        `noise_keys` or a `draft_token_map`. A row with a negative number (a −inf counts as 0) or an infinite sum
        has all its mass on the largest and sets `Status.BAD_PARAM`, but not where it is greedy, holds a +inf
        (`Status.INF`) or nothing of 2**-126 or more (`Status.EMPTY_ROW`, id 0).
    row_index : Tensor, optional
        ``[batch]`` int32 or int64: sequence b is drawn from ``logits[row_index[b]]`` (or `probs`). These are then
        ``[rows, vocab]`` or ``[rows, n, vocab]`` and read in place; sequences may share a row. All else is per
        sequence, not per row: parameters, processors, uniforms, keys and outputs. An index outside [0, rows) gives no
        token (−1, log-probability −inf) and the stats of a row where nothing is possible, with `Status.BAD_PARAM`
        alone.
    processors : Processors, optional
        Masks, biases and penalties, which act on the logits before `params`.
        Not with a `draft_token_map`.
    uniform_samples : Tensor, optional
        ``[batch]`` or ``[batch, n]`` float64 or float32 in [0, 1).
    noise_keys : Tensor, optional
        ``[batch]`` or ``[batch, n]`` int64. Exactly one of the two is needed, unless ``params.temperature`` is the
        number 0.
    num_samples : int
        1 … 1024; more than 1 needs `noise_keys`.
    draft_token_map : TokenMap, optional
        The logits have this reduced vocabulary; tokens come out as target ids, and the noise is that of the target ids.
    backend : str, optional
        "reference", "cpu", "triton" or "cuda"; None: that of ``SPECDEC_BACKEND``, else the best one for the device.

    Returns
    -------
    Draw
        ``token`` and ``log_prob`` have the shape of the rows (``[..., num_samples]`` where that is > 1); ``stats`` are
        those of the rows (their raw fields are not computed: −inf); with `probs`, max and cutoff are probabilities, the
        normalizer is the sum of what is kept over max, and log_normalizer the logarithm of ``max * normalizer``.

    Raises
    ------
    TypeError, ValueError
        A wrong dtype, shape, stride, device or range, a source of randomness missing, or a backend that cannot run
        here; before any work.
    RuntimeError
        A status is set while ``SPECDEC_CHECK=1``; after the work.
    """
    op = "sample"
    given_rows, name, (*leading, vocab) = check_rows(op, "logits", logits, probs)
    if len(leading) not in (1, 2):
        raise shape_error(op, name, "[batch, vocab] or [batch, n, vocab]", given_rows)
    shape, names, device = tuple(leading), ("batch", "n")[: len(leading)], given_rows.device
    if row_index is not None:
        check_tensor(op, "row_index", row_index, ID_DTYPES, device)
        if row_index.dim() != 1:
            raise shape_error(op, "row_index", "[batch]", row_index)
        shape = (len(row_index), *shape[1:])
    params = check_params(op, "params", params, shape[0], device)
    if probs is not None:
        refused = {"processors": processors, "noise_keys": noise_keys, "draft_token_map": draft_token_map}
        check_beside_probs(op, "probs", params, refused)
    if uniform_samples is not None:
        check_given(op, "uniform_samples", uniform_samples, UNIFORM_DTYPES, device, names, shape)
    if noise_keys is not None:
        check_given(op, "noise_keys", noise_keys, INT64, device, names, shape)
        if uniform_samples is not None:
            raise ValueError(f"{op}: give uniform_samples or noise_keys, got both")
    elif uniform_samples is None and not params.is_greedy:
        raise ValueError(
            f"{op}: uniform_samples or noise_keys must be given unless params.temperature is 0, got neither"
        )
    check_int(op, "num_samples", num_samples, 1, MAX_SAMPLES)
    if num_samples > 1 and noise_keys is None:
        raise ValueError(f"{op}: num_samples={num_samples} needs noise_keys (a draw without replacement)")
    mapping = None
    if draft_token_map is not None:
        check_instance(op, "draft_token_map", draft_token_map, TokenMap, "a TokenMap")
        mapping = draft_token_map.draft_to_target
        check_tensor(op, "draft_token_map", mapping, INT64, device)
        check_shape(op, "draft_token_map", mapping, ("vocab",), (vocab,))
        if processors is not None:
            raise ValueError(f"{op}: processors must be None where there is a draft_token_map, got both")
    given = None if processors is None else check_processors(op, processors, given_rows, names, shape[0], shape)
    token, log_prob, values, argmax, status = _call(
        dispatch(op, _op, backend, device),
        logits=given_rows, uniform_samples=uniform_samples, noise_keys=noise_keys, draft_to_target=mapping,
        num_samples=num_samples, params=params, processors=given, probs=probs is not None,
        row_index=row_index,
    )  # fmt: skip
    raise_for_status(op, status)
    return Draw(token, log_prob, RowStats(values, argmax, status))
