"""`verify_chain`: accept or reject a drafted chain and draw the token after it."""

from __future__ import annotations

import torch
from torch import Tensor

from ..checks import ID_DTYPES, INT32, check_flag, check_one_of, shape_error
from ..flat import LOSSLESS
from ..laws import TargetLaw
from ..processors import Processors
from ..sampling import SamplingParams
from ..types import RowStats, TokenMap, VerifyOutput
from ._common import (
    Expected,
    Shape,
    check_params,
    check_processors,
    check_rows,
    define,
    dispatch,
    raise_for_status,
)
from ._random import RandomNumbers, noise_of
from ._verify import check_certain, check_draft, check_draft_for_law, check_eos, check_indexed, check_target_probs
from .arguments import ACCEPTANCES, VerifyChainArguments

DRAFTED, ROWS = ("batch", "num_draft"), ("batch", "num_draft + 1")
# Of draft_tokens, as these and the target are compared first, and either may be the wrong one.
TOKENS, TOKENS_BEFORE_BONUS = ("batch", "num_draft (target's rows - 1)"), ("batch", "num_draft (target's rows)")

# What `verify_chain` and `verify_packed` are both called with. (A plain tuple: a named one costs 0.2 microseconds.)
SpanCall = tuple[
    Tensor, Tensor, Tensor | None, RandomNumbers, SamplingParams | None, SamplingParams | None,
    Processors | None, str, TargetLaw | None, bool,
    Tensor | None, Tensor | None, RowStats | None, TokenMap | None, Tensor | None, Tensor | None, Tensor | None, bool,
]  # fmt: skip


def _fake(args: VerifyChainArguments) -> tuple[Tensor, ...]:
    cu, num_draft, like = args.cu_num_draft_tokens, args.num_draft, args.draft_tokens
    batch = like.shape[0] if cu is None else cu.shape[0] - 1
    return (
        like.new_empty((batch, num_draft + 1), dtype=torch.int64),
        *(like.new_empty((batch,), dtype=torch.int32) for _ in range(3)),
        like.new_empty((batch, num_draft) if args.return_acceptance else (0,), dtype=torch.float32),
    )


_op, _call = define(
    "verify_chain",
    VerifyChainArguments,
    "(Tensor tokens, Tensor num_accepted, Tensor num_tokens, Tensor status, Tensor acceptance)",
    _fake,
)


def verify_chain(
    target_logits: Tensor | None,
    draft_tokens: Tensor,
    draft_logits: Tensor | None = None,
    *,
    uniform_samples: Tensor | None = None,
    noise_keys: Tensor | None = None,
    seeds: Tensor | None = None,
    step: int | Tensor | None = None,
    positions: Tensor | None = None,
    params: SamplingParams | None = None,
    draft_params: SamplingParams | None = None,
    processors: Processors | None = None,
    acceptance: str = "token",
    target_law: TargetLaw | None = None,
    target_probs: Tensor | None = None,
    draft_probs: Tensor | None = None,
    draft_index: Tensor | None = None,
    draft_stats: RowStats | None = None,
    draft_token_map: TokenMap | None = None,
    num_draft_tokens: Tensor | None = None,
    bonus_tokens: Tensor | None = None,
    eos_token_ids: Tensor | None = None,
    return_acceptance: bool = False,
    backend: str | None = None,
) -> VerifyOutput:
    """Accept the longest prefix of each drafted chain that the rule allows, and draw the one token after it.

    With x the draft token at a position, P and Q the target's and the draft's distributions there and u a coin:

    - "token": accept iff ``u · Q(x) < P(x)``, else draw the recovered token from ``norm((P − Q)+)`` (Leviathan et al.,
      arXiv 2211.17192; Chen et al., arXiv 2302.01318, theorem 1);
    - "block": block verification, which accepts no fewer on average (Sun et al., arXiv 2403.10444, algorithm 2);
    - "match": draw y from P with the position's Gumbel noise and accept while ``x == y``: plain sampling's own tokens;
    - "greedy": accept while x is the target's argmax, whatever the temperature.

    The first three are lossless: the emitted tokens have the target's distribution (after `params`); "greedy" emits the
    target's own greedy output. A `target_law` replaces P in "token" and "block" with another distribution π, made at
    each position from both models' (`sk.laws` has the table); the bonus token is drawn from P unless `target_law` says
    otherwise. A sequence's result does not depend on its neighbours, on padding or on num_draft. Without draft logits
    or probabilities, all of Q's mass is on the draft token.

    A draft token that Q cannot have produced ends the sequence's draft before it and sets `Status.BAD_DRAFT`. The rule
    goes on as if there were no more draft tokens, so what is emitted still has the target's distribution. Such a token
    is noticed only where Q is read: in "token" up to the first rejection, but not at temperature 0, at a +inf or where
    no id is possible (unless `target_law` is a cascade); in "block" up to the first x with ``P(x) = 0`` (``π(x)`` with
    a `target_law`), whatever the coins say; in "match" and "greedy" never. Its ``Q(x)`` is 0 (x is cut off by the given
    `draft_params` or `draft_stats`, has a logit of −inf or a probability of 0, or is not in the reduced vocabulary) or
    above 1.01; from 1 to 1.01 it counts as a rounded 1. Or Q is not a distribution:

    - `draft_probs`: one is NaN, +inf or negative, or their sum is not within 0.01 of 1 (a −inf counts as 0);
    - `draft_stats`: the max or the cutoff is NaN, the cutoff exceeds the max, or the normalizer is not in [0.99, 1.01
      vocab_draft]; where all mass is on `argmax`, the max is NaN or `argmax` no id of the row.

    For a cascade's bonus such a Q counts as 0, and P is used instead of π. A wrong but possible Q goes undetected.

    Parameters
    ----------
    target_logits : Tensor or None
        ``[batch, num_draft + 1, vocab]`` float32, bfloat16 or float16, ``2 <= vocab <= 2**30`` and ``batch * (num_draft
        + 1) < 2**31``: row ``i`` judges draft token ``i`` (from 0), the bonus is drawn from the last row. Any leading
        strides, contiguous in the last dimension.
    draft_tokens : Tensor
        ``[batch, num_draft]`` int32 or int64 target ids; a −1 ends that sequence's draft.
    draft_logits : Tensor, optional
        ``[batch, num_draft, vocab_draft]`` float32, bfloat16 or float16, contiguous in the last dimension: the rows
        that the draft tokens were drawn from. vocab_draft is vocab, or the length of the `draft_token_map`. One row
        more where `target_law` has ``bonus="cascade"``: the draft's logits for the token after the draft.
    uniform_samples : Tensor, optional
        ``[batch, num_draft + 1]`` float64 or float32 in [0, 1): column 0 draws the recovered or bonus token, column i
        is the coin of the i-th draft token. Needed by "token" and "block" unless `seeds` are given or
        ``params.temperature`` is the number 0 (with a cascade as `target_law`, that of `draft_params` too); refused
        with "match" or `seeds`; "greedy" checks them but does not use them. "block" needs fresh ones (and fresh draft
        noise) at every verify step.
    noise_keys : Tensor, optional
        ``[batch, num_draft + 1]`` int64, from `noise_keys` at the positions of the tokens that the rows draw. Needed by
        "match" unless `seeds` are given or ``params.temperature`` is the number 0; refused with any other rule or
        `seeds`.
    seeds : Tensor, optional
        ``[batch]`` int64, instead of both: each number is computed where it is needed, and is that of
        ``uniform_samples(seeds, step, num_draft + 1)``, or for "match" of ``noise_keys(seeds, positions, step=step)``.
    step : int or Tensor, optional
        Only with `seeds`, which need it (optional for "match"): the verify step, >= 0, or ``[batch]`` int64 on the
        device.
    positions : Tensor, optional
        Only with `seeds` and "match", which needs them: ``[batch, num_draft + 1]`` int32 or int64: the absolute
        position of the token that each row draws; for row 0, the number of tokens so far.
    params, draft_params : SamplingParams, optional
        Of target and draft. `draft_params` must match how the draft tokens were drawn; `draft_probs` already include
        them. None: temperature 1, nothing cut.
    processors : Processors, optional
        Masks, biases and penalties, which act on the target's logits before `params`; each row also counts the draft
        tokens before it. The draft's logits are left as they are: with a cascade as `target_law`, barred ids can be
        emitted where the draft's token is kept.
    acceptance : {"token", "block", "match", "greedy"}
        The rule. "block" is the same as "token" for a sequence without draft logits or probabilities, or whose draft
        logits have temperature 0.
    target_law : one of `sk.laws`, optional
        None: lossless. "token" takes any law, "block" any except `Lossy` with a number as β, "match" and "greedy" none.
        All but `Lossy` need `draft_logits`.
    target_probs : Tensor, optional
        Instead of `target_logits` (None): the same as float32 probabilities. `params` cut them by top-k, top-p and
        min-p (leave out what is already applied); their temperature must be the number 1, or 0 for the likeliest id.
        Not with `processors`, acceptance "match" or a cascade, which look at logits. Each row is divided by its sum.
        `Status.BAD_PARAM` is set where the sum is not within 0.01 of 1, and where the row has a negative number (a −inf
        counts as 0) or an infinite sum, in which case all mass is put on its largest. The sum is not checked where the
        row is greedy, holds a +inf (`Status.INF`) or nothing of 2**-126 or more (`Status.EMPTY_ROW`).
    draft_probs : Tensor, optional
        Instead of `draft_logits`: ``[batch, num_draft, vocab_draft]`` float32, normalised: they must sum to 1.
    draft_index : Tensor, optional
        ``[batch]`` int32 or int64: the rows of sequence b are ``draft_logits[draft_index[b]]`` (or `draft_probs`).
        These are then ``[requests, >= num_draft, vocab_draft]``, kept by the caller for all its requests (one row more
        with ``bonus="cascade"``) and read in place. An index outside [0, requests) makes an idle row with
        `Status.BAD_PARAM`. Not with `draft_stats`.
    draft_stats : RowStats, optional
        Stats of the draft rows, kept from drafting, of the shape of `draft_logits` without its last dimension. They
        save reading those rows again (not with a `target_law` that looks at the raw q) and give Q bit for bit.
    draft_token_map : TokenMap, optional
        Maps a reduced draft vocabulary to target ids.
    num_draft_tokens : Tensor, optional
        ``[batch]`` int32 or int64: how many to use of each sequence; −1: an idle row, which emits nothing.
    bonus_tokens : Tensor, optional
        ``[batch]`` int32 or int64: the token after a fully accepted draft, instead of one that is drawn. The target
        then has no row for it: `target_logits` (or `target_probs`, and a `token_bitmask`) is ``[batch, num_draft,
        vocab]``. `uniform_samples`, `noise_keys` and `positions` keep their shape; column 0 draws recovered tokens
        alone, the last key or position is not read. It is ignored after a rejection, after an EOS and in an idle row,
        and where the draft ended before a token that is no id (including −1) or that Q cannot have produced: there the
        token is drawn from P, as without it. With −1 nothing follows. Any other id outside the vocabulary is dropped
        where it would follow, and sets `Status.BAD_TOKEN`. Not with a cascade's ``bonus="cascade"``.
    eos_token_ids : Tensor, optional
        ``[num_eos]`` int64: a draft ends after its first EOS, and nothing is drawn after an accepted one.
    return_acceptance : bool
        Also return ``Σ_v min(P(v), Q(v))`` for each drafted position, whatever the `target_law` (reads every row); with
        acceptance "greedy" P has all its mass on the argmax.
    backend : str, optional
        "reference", "cpu", "triton" or "cuda"; None: that of ``SPECDEC_BACKEND``, else the best one for the device.

    Returns
    -------
    VerifyOutput
        tokens ``[batch, num_draft + 1]`` int64, num_accepted, num_tokens and status ``[batch]`` int32; acceptance
        ``[batch, num_draft]`` float32, or None where it was not asked for.

    Raises
    ------
    TypeError, ValueError
        A wrong dtype, shape, stride, device or combination, or a backend that cannot run here; before any work. What
        only the values show sets ``status`` instead.
    RuntimeError
        A status is set while ``SPECDEC_CHECK=1``; after the work.
    """
    op = "verify_chain"
    target, name, shape = check_rows(op, "target_logits", target_logits, target_probs)
    bonus_rows = 1 if bonus_tokens is None else 0
    if len(shape) != 3 or shape[1] < bonus_rows:
        raise shape_error(op, name, f"[batch, num_draft{' + 1' if bonus_rows else ''}, vocab]", target)
    batch, num_draft = shape[0], shape[1] - bonus_rows
    asked = (
        target, draft_tokens, draft_logits, (uniform_samples, noise_keys, seeds, step, positions), params,
        draft_params, processors, acceptance, target_law, target_probs is not None,
        draft_probs, draft_index, draft_stats, draft_token_map, num_draft_tokens, bonus_tokens, eos_token_ids,
        return_acceptance,
    )  # fmt: skip
    drafted = (DRAFTED, (batch, num_draft))
    return verify_spans(op, backend, asked, batch, num_draft, None, drafted, (ROWS, (batch, num_draft + 1)))


def verify_spans(
    op: str,
    backend: str | None,
    asked: SpanCall,
    batch: int,
    num_draft: int,
    cu: Tensor | None,
    drafted: Shape,
    rows: Shape,
) -> VerifyOutput:
    """Validate what `verify_chain` and `verify_packed` share, and run the op.

    `drafted` and `rows` are the shapes of the draft's and of the target's rows; with bonus tokens the target's rows
    have the shape `drafted` too. There are as many random numbers as `rows`.
    """
    (
        target_logits, draft_tokens, draft_logits, numbers, params, draft_params, processors, acceptance, target_law,
        probs, draft_probs, draft_index, draft_stats, draft_token_map, num_draft_tokens, bonus_tokens,
        eos_token_ids, return_acceptance,
    ) = asked  # fmt: skip
    device = target_logits.device
    if batch * (num_draft + 1) >= 2**31:  # kernels number a batch's tokens in int32
        name = "num_draft" if cu is None else "max_num_draft_tokens"
        raise ValueError(f"{op}: batch * ({name} + 1) must be < 2**31, got {batch} * {num_draft + 1}")
    check_one_of(op, "acceptance", acceptance, ACCEPTANCES)
    rule = ACCEPTANCES[acceptance]
    if return_acceptance is not False:
        check_flag(op, "return_acceptance", return_acceptance)
    law, draft_rows = LOSSLESS, drafted
    if target_law is not None:
        check_draft_for_law(op, acceptance, target_law, draft_logits, draft_token_map)
        law = target_law.flat()
        if law.cascade_bonus:
            draft_rows = rows
    params = check_params(op, "params", params, batch, device)
    draft_params = check_params(op, "draft_params", draft_params, batch, device)
    if probs:
        check_target_probs(op, acceptance, params, processors, target_law)
    given = None
    if processors is not None:
        names = (rows if bonus_tokens is None else drafted)[0]
        given = check_processors(op, processors, target_logits, names, batch)
    noise, steps, step = noise_of(op, acceptance, numbers, target_logits, batch, *rows)
    names, shape = drafted
    if cu is None:
        names = TOKENS if bonus_tokens is None else TOKENS_BEFORE_BONUS
    expected: list[Expected] = [("draft_tokens", draft_tokens, ID_DTYPES, names, shape)]
    if noise[1] is not None:
        expected.append(noise)
    if cu is not None:
        expected.append(("cu_num_draft_tokens", cu, INT32, ("batch + 1",), (batch + 1,)))
    if num_draft_tokens is not None:
        expected.append(("num_draft_tokens", num_draft_tokens, ID_DTYPES, ("batch",), (batch,)))
    if bonus_tokens is not None:
        if law.cascade_bonus:
            raise ValueError(f"{op}: bonus_tokens must be None beside a target_law with bonus='cascade', got some")
        expected.append(("bonus_tokens", bonus_tokens, ID_DTYPES, ("batch",), (batch,)))
    if draft_index is not None:
        least = num_draft + law.cascade_bonus
        draft_rows = check_indexed(op, draft_logits, draft_probs, draft_stats, least)
        expected.append(("draft_index", draft_index, ID_DTYPES, ("batch",), (batch,)))
    values, argmax, status, target_to_draft = check_draft(
        op, target_logits, draft_rows, draft_logits, draft_probs, draft_stats, draft_token_map, expected
    )
    if noise[1] is None and acceptance != "greedy":
        check_certain(op, acceptance, params, draft_params, law, noise)
    if eos_token_ids is not None:
        check_eos(op, eos_token_ids, device)
    uniform_samples, noise_keys, seeds, _, positions = numbers
    out = _call(
        dispatch("verify_chain", _op, backend, device, op),
        target_logits=target_logits, draft_logits=draft_logits, draft_probs=draft_probs, draft_values=values,
        draft_argmax=argmax, draft_status=status, target_to_draft=target_to_draft, uniform_samples=uniform_samples,
        noise_keys=noise_keys, seeds=seeds, steps=steps, positions=positions, step=step,
        eos_token_ids=eos_token_ids, processors=given, law=law, params=params, draft_params=draft_params,
        draft_tokens=draft_tokens, num_draft_tokens=num_draft_tokens, cu_num_draft_tokens=cu, num_draft=num_draft,
        acceptance=rule, return_acceptance=return_acceptance, target_probs=probs,
        draft_index=draft_index, bonus_tokens=bonus_tokens,
    )  # fmt: skip
    tokens, num_accepted, num_tokens, status, overlap = out
    raise_for_status(op, status)
    return VerifyOutput(tokens, num_accepted, num_tokens, status, overlap if return_acceptance else None)
