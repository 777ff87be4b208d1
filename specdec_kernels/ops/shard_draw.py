"""`shard_draw`: a shard's part in drawing a token."""

from __future__ import annotations

from torch import Tensor

from ..checks import FLOAT32, INT32, INT64, LOGIT_DTYPES, MAX_VOCAB, UNIFORM_DTYPES, check_logits, shape_error
from ..sampling import SamplingParams
from ..types import RowStats, ShardDraw
from ._common import Expected, check_params, check_tensors, define, dispatch
from ._verify import check_stats
from .arguments import TILE, ShardDrawArguments, tiles_of


def _fake(args: ShardDrawArguments) -> tuple[Tensor, Tensor, Tensor]:
    batch, n, width = args.logits.shape
    noisy, drawn = args.noise_keys is not None, args.masses is not None
    return (
        args.values.new_empty((0,) if noisy or drawn else (batch, n, tiles_of(width))),
        args.argmax.new_empty((batch, n) if noisy or drawn else (0,)),
        args.values.new_empty((batch, n) if noisy else (0,)),
    )


_op, _call = define("shard_draw", ShardDrawArguments, "(Tensor masses, Tensor token, Tensor score)", _fake)


def shard_draw(
    logits: Tensor,
    stats: RowStats,
    weights: Tensor,
    params: SamplingParams | None = None,
    *,
    first: int = 0,
    draft_logits: Tensor | None = None,
    draft_stats: RowStats | None = None,
    draft_params: SamplingParams | None = None,
    draft_probs: Tensor | None = None,
    draft_status: Tensor | None = None,
    point_tokens: Tensor | None = None,
    masses: Tensor | None = None,
    uniform_samples: Tensor | None = None,
    noise_keys: Tensor | None = None,
    backend: str | None = None,
) -> ShardDraw:
    """What one shard of each row contributes to the draw of a token.

    With P the row's distribution, Q the draft's there and w the row's weight, the token is drawn from ``(w P − Q)+``,
    or from P where w is negative. A first call returns the masses of the shard's tiles; given those of all shards and a
    uniform, a second call returns the token in the shard where the draw ends. With `noise_keys` the token is the
    shard's best by ``log P + G``.

    Parameters
    ----------
    logits : Tensor
        ``[batch, n, width]`` float32, bfloat16 or float16, contiguous in the last dimension: the ids ``first … first +
        width − 1`` of each row.
    stats : RowStats
        Of the whole rows, ``[batch, n]``, uncut.
    weights : Tensor
        ``[batch, n]`` float32: w, at most 1; where it is 0, nothing is left to draw from.
    params, draft_params : SamplingParams, optional
        Only the temperatures count; they must be those that the stats were made with.
    first : int
        A multiple of 1024.
    draft_logits, draft_stats : Tensor, RowStats, optional
        The draft's logits, of the shape of `logits`, and the stats of its whole rows, which may be cut.
    draft_probs, draft_status : Tensor, optional
        Instead of those: probabilities of the shape of `logits`, float32, and ``[batch, n]`` int32, where
        `Status.BAD_DRAFT` says that the whole row is no distribution.
    point_tokens : Tensor, optional
        Instead of both: ``[batch, n]`` int64 ids that have all of Q's mass; −1: none.
    masses, uniform_samples : Tensor, optional
        ``[batch, n, tiles]`` float32 of all shards' tiles in the order of their ids, and ``[batch, n]``
        float64 or float32 in [0, 1).
    noise_keys : Tensor, optional
        ``[batch, n]`` int64; without a draft, and the weights are not looked at.
    backend : str, optional
        "reference", "cpu", "triton" or "cuda"; None: that of ``SPECDEC_BACKEND``, else the best one for the device.

    Returns
    -------
    ShardDraw
        ``masses [batch, n, tiles of this shard]`` float32, which with `draft_logits` or `draft_probs` and a w >= 0 are
        probabilities, otherwise only proportional to them, by a factor of the backend's that all shards of a row share;
        or with `masses` ``token [batch, n]`` int64, −1 where the draw ends elsewhere, or where nothing has mass; or
        with `noise_keys` ``token`` and ``score [batch, n]`` float32, −inf where the shard has nothing possible. What
        was not asked for is None. A row whose P is all on its argmax has the mass ``(w − Q)+`` there (1 where w is
        negative), and is not drawn from: its token is −1.

    Raises
    ------
    TypeError, ValueError
        A wrong dtype, shape, stride, device or combination, or a backend that cannot run here; before any work.
    """
    op = "shard_draw"
    shape = tuple(check_logits(op, "logits", logits, least=1))
    if len(shape) != 3:
        raise shape_error(op, "logits", "[batch, n, width]", logits)
    if isinstance(first, bool) or not isinstance(first, int) or first % TILE or not 0 <= first <= MAX_VOCAB - shape[2]:
        raise ValueError(f"{op}: first must be a multiple of {TILE} in [0, {MAX_VOCAB - shape[2]}], got {first!r}")
    device, rows = logits.device, ("batch", "n")
    params = check_params(op, "params", params, shape[0], device)
    draft_params = check_params(op, "draft_params", draft_params, shape[0], device)
    expected: list[Expected] = [("weights", weights, FLOAT32, rows, shape[:2])]
    values, argmax, _ = check_stats(op, "stats", stats, (rows, shape[:2]), expected)
    of_draft: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, draft_status)
    if sum(given is not None for given in (draft_logits, draft_probs, point_tokens)) > 1:
        raise ValueError(f"{op}: give draft_logits, draft_probs or point_tokens, got several")
    if (draft_logits is None) != (draft_stats is None):
        raise ValueError(f"{op}: draft_logits and draft_stats go together, got one of them")
    if (draft_probs is None) != (draft_status is None):
        raise ValueError(f"{op}: draft_probs and draft_status go together, got one of them")
    if draft_stats is not None:
        of_draft = check_stats(op, "draft_stats", draft_stats, (rows, shape[:2]), expected)
    width, vocab = ("batch", "n", "vocab"), shape
    for name, tensor, dtypes, names, size in (
        ("draft_logits", draft_logits, LOGIT_DTYPES, width, vocab),
        ("draft_probs", draft_probs, FLOAT32, width, vocab),
        ("draft_status", draft_status, INT32, rows, shape[:2]),
        ("point_tokens", point_tokens, INT64, rows, shape[:2]),
        ("uniform_samples", uniform_samples, UNIFORM_DTYPES, rows, shape[:2]),
        ("noise_keys", noise_keys, INT64, rows, shape[:2]),
    ):
        if tensor is not None:
            expected.append((name, tensor, dtypes, names, size))
    if (masses is None) != (uniform_samples is None):
        raise ValueError(f"{op}: masses and uniform_samples go together, got one of them")
    if masses is not None:
        if noise_keys is not None:
            raise ValueError(f"{op}: give masses or noise_keys, got both")
        least = tiles_of(first + shape[2])
        if not isinstance(masses, Tensor) or masses.dim() != 3 or masses.shape[2] < least:
            raise shape_error(op, "masses", f"[batch, n, tiles] with tiles >= {least}", masses)
        expected.append(("masses", masses, FLOAT32, ("batch", "n", "tiles"), (*shape[:2], masses.shape[2])))
    check_tensors(op, logits, expected)
    if noise_keys is not None and any(given is not None for given in (draft_logits, draft_probs, point_tokens)):
        raise ValueError(f"{op}: give a draft or noise_keys, got both")
    draft_values, draft_argmax, status = of_draft
    out = _call(
        dispatch(op, _op, backend, device),
        logits=logits, values=values, argmax=argmax, draft_logits=draft_logits, draft_probs=draft_probs,
        draft_values=draft_values, draft_argmax=draft_argmax, draft_status=status, point_tokens=point_tokens,
        weights=weights, masses=masses, uniform_samples=uniform_samples, noise_keys=noise_keys, first=first,
        params=params, draft_params=draft_params,
    )  # fmt: skip
    noisy, drawn = noise_keys is not None, masses is not None
    return ShardDraw(None if noisy or drawn else out[0], out[1] if noisy or drawn else None, out[2] if noisy else None)
