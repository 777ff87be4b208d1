"""`token_logprobs`: how likely tokens were, and what else was likely."""

from __future__ import annotations

import torch
from torch import Tensor

from ..checks import ID_DTYPES, check_given, check_int, check_logits, shape_error
from ..processors import Processors
from ..sampling import SamplingParams
from ..types import TokenLogprobs
from ._common import check_params, check_processors, define, dispatch, raise_for_status
from .arguments import TokenLogprobsArguments

MAX_TOP = 20


def _fake(args: TokenLogprobsArguments) -> tuple[Tensor, ...]:
    shape, like = args.tokens.shape, args.logits
    top = (*shape, args.num_top)
    return (
        like.new_empty(shape, dtype=torch.float32), like.new_empty(shape, dtype=torch.float32),
        like.new_empty(shape, dtype=torch.int32), like.new_empty(shape, dtype=torch.int32),
        like.new_empty(top, dtype=torch.int64), like.new_empty(top, dtype=torch.float32),
        like.new_empty(top, dtype=torch.float32),
    )  # fmt: skip


_op, _call = define(
    "token_logprobs",
    TokenLogprobsArguments,
    "(Tensor raw_log_prob, Tensor log_prob, Tensor rank, Tensor status, Tensor top_ids, Tensor top_log_prob,"
    " Tensor top_processed_log_prob)",
    _fake,
)


def token_logprobs(
    logits: Tensor,
    tokens: Tensor,
    params: SamplingParams | None = None,
    *,
    processors: Processors | None = None,
    rows: Tensor | None = None,
    num_tokens: Tensor | None = None,
    num_top: int = 0,
    backend: str | None = None,
) -> TokenLogprobs:
    """Log-probabilities and ranks of tokens, and the likeliest ids of the rows that they were drawn from.

    Only the rows of tokens are read, and nothing as wide as the vocabulary is written.

    Parameters
    ----------
    logits : Tensor
        ``[batch, n, vocab]`` float32, bfloat16 or float16, n >= 1, any leading strides, contiguous in the last
        dimension.
    tokens : Tensor
        ``[batch, width]`` int32 or int64, −1: no token; as `verify_chain` and `verify_tree` give them.
    params : SamplingParams, optional
        What the tokens were drawn with. None: temperature 1, nothing cut.
    processors : Processors, optional
        What was applied to the logits before `params`, with the `token_counts` from before the step: at each of a
        sequence's tokens, those before it are counted too, as draft tokens are. Raw log-probabilities, ranks and the
        choice of the likeliest ids use the logits as given.
    rows : Tensor, optional
        ``[batch, width]`` int32 or int64: the row of `logits` that each token was drawn from; for a tree 0, then the
        accepted nodes. None: token j from row j, and ``width <= n``.
    num_tokens : Tensor, optional
        ``[batch]`` int32 or int64: how many of a sequence's tokens are looked at; the others count as no token.
    num_top : int
        0 … 20 likeliest ids are listed beside each token.
    backend : str, optional
        "reference", "cpu", "triton" or "cuda"; None: that of ``SPECDEC_BACKEND``, else the best one for the device.

    Returns
    -------
    TokenLogprobs
        ``[batch, width]`` each, ``[batch, width, num_top]`` of the likeliest ids.

    Raises
    ------
    TypeError, ValueError
        A wrong dtype, shape, stride, device or range, or a backend that cannot run here; before any work. What only the
        values show sets `TokenLogprobs.status` instead.
    RuntimeError
        A status is set while ``SPECDEC_CHECK=1``; after the work.
    """
    op = "token_logprobs"
    shape = check_logits(op, "logits", logits)
    if len(shape) != 3 or shape[1] < 1:
        raise shape_error(op, "logits", "[batch, n >= 1, vocab]", logits)
    (batch, n, _), device = shape, logits.device
    params = check_params(op, "params", params, batch, device)
    width = tokens.shape[1] if isinstance(tokens, Tensor) and tokens.dim() == 2 else n
    check_given(op, "tokens", tokens, ID_DTYPES, device, ("batch", "width"), (batch, width))
    if rows is not None:
        check_given(op, "rows", rows, ID_DTYPES, device, ("batch", "width"), (batch, width))
        rows = rows.long()
    elif width > n:
        raise shape_error(op, "tokens", f"[batch={batch}, width <= n={n}] where no rows are given", tokens)
    if num_tokens is not None:
        check_given(op, "num_tokens", num_tokens, ID_DTYPES, device, ("batch",), (batch,))
    check_int(op, "num_top", num_top, 0, MAX_TOP)
    given = None if processors is None else check_processors(op, processors, logits, ("batch", "n"), batch)
    out = TokenLogprobs(
        *_call(
            dispatch(op, _op, backend, device),
            logits=logits, tokens=tokens.long(), rows=rows, num_tokens=num_tokens, num_top=num_top, params=params,
            processors=given,
        )
    )  # fmt: skip
    raise_for_status(op, out.status)
    return out
