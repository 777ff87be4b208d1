"""`verify_chain` over a sharded vocabulary."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..backends import check_backend, implementation
from ..checks import ID_DTYPES, check_logits, check_one_of, shape_error
from ..config import settings
from ..flat import LOSSLESS
from ..ops._common import Expected, check_params, raise_for_status, unchecked
from ..ops._random import noise_of
from ..ops._verify import check_certain, check_draft, check_eos
from ..ops.noise_keys import noise_keys as make_noise_keys
from ..ops.uniform_samples import uniform_samples as make_uniform_samples
from ..ops.verify_chain import DRAFTED, ROWS
from ..ops.verify_chain import verify_chain as op
from ..sampling import GREEDY, SamplingParams
from ..types import VerifyOutput
from .cut import cuts_of, verify_in_groups
from .exchange import OP, Exchange
from .layout import layout_of, own_tiles
from .rows import Shard
from .rules import RULES, ShardedCall

_OF_THE_OP = inspect.signature(op).parameters  # those that are not named below must be left out


def verify_chain(
    target_logits: Tensor,
    draft_tokens: Tensor,
    draft_logits: Tensor | None = None,
    *,
    group: Any = None,
    widths: Sequence[int] | None = None,
    uniform_samples: Tensor | None = None,
    noise_keys: Tensor | None = None,
    seeds: Tensor | None = None,
    step: int | Tensor | None = None,
    positions: Tensor | None = None,
    params: SamplingParams | None = None,
    draft_params: SamplingParams | None = None,
    acceptance: str = "token",
    draft_probs: Tensor | None = None,
    num_draft_tokens: Tensor | None = None,
    eos_token_ids: Tensor | None = None,
    backend: str | None = None,
    **refused: object,
) -> VerifyOutput:
    """`specdec_kernels.verify_chain` where each rank of a group has some of the vocabulary's columns.

    Every rank calls it with its columns of the logits and with the same of everything else, and every rank gets what
    the op gives on the whole logits, bit for bit (with Triton's kernels, which add up listed ids in the order of their
    list, up to rounding where sampling truncates). Rank r has the ids that follow those of rank r − 1; shards may be of
    any width >= 1. All ranks must compute with the same backend and, on CPUs, the same instructions: others round in
    another way, and ranks could then decide differently. For each row the ranks exchange the maximum and the mass of
    each tile of 1024 ids and the logit of the draft token, and then the tiles' masses of the row that the token after
    the accepted ones is drawn from. The amount of numbers is in proportion to ``batch · num_draft · vocab / 1024``.
    Where a shard does not start at a multiple of 1024, the ids between its start and the next multiple go to the rank
    that has the tile's first id, at most 1023 a row.

    Where sampling truncates, each rank sends the largest logits of a row with the numbers above: ``top_k + 1`` of them,
    or 128 with `top_p` or `min_p` alone; of every truncated row of target or draft as many as of the one with most
    needs. If all ids that may be kept are among those, as is usual except with ties and in rather flat rows, no other
    round is needed. Otherwise the ids of truncated rows that may be kept are sent in two more rounds. With `top_p` and
    nothing else that bounds what is kept, at most five rounds come before these, which send the mass in each of 256
    ranges of logits, so that at most 256 ids, or the ties of one logit, are sent beyond what is kept. A row is
    exchanged whole where `top_p` would then look among more than 4096 ids, where `top_k` is more than 4096, where
    `top_p` alone stands beside an invalid `min_p`, where no id is possible, and where the mass at a cut-off is so near
    to `top_p` (2**-19 of the row's) that rounding decides: then the op itself does.

    Every call waits for the device, more often where `widths` are not given, parameters are tensors, rows are cut or
    the rule is "block", and cannot be captured in a CUDA graph. For rows that are cut, each rank makes tensors as wide
    as the whole vocabulary.

    Parameters
    ----------
    target_logits, draft_logits, draft_probs : Tensor
        As in `specdec_kernels.verify_chain`, this rank's columns of them: ``[batch, num_draft + 1, width]`` and
        ``[batch, num_draft, width]``.
    group : torch.distributed.ProcessGroup, optional
        None: the default one. Its timeout is this call's: with gloo, if a rank is silent for that long or has ended,
        the others raise; NCCL's watchdog ends the process instead, by default.
    widths : sequence of int, optional
        The width of each rank's shard; saves the round that exchanges them.
    draft_tokens, num_draft_tokens, eos_token_ids, uniform_samples, noise_keys, seeds, step, positions
        As in `specdec_kernels.verify_chain`, the same on all ranks.
    params, draft_params : SamplingParams, optional
        As in `specdec_kernels.verify_chain`.
    acceptance : {"token", "block", "match", "greedy"}
        The rule.
    backend : str, optional
        Of the ops that read the rows.

    Returns
    -------
    VerifyOutput
        The same on every rank.

    Raises
    ------
    TypeError, ValueError
        As in `specdec_kernels.verify_chain`; also refused are its arguments that are not listed above, and a vocabulary
        of one tile.
    RuntimeError
        torch.distributed is not initialised, or a rank has ended or did not answer in time; or, after the work, a
        status is set while ``SPECDEC_CHECK=1``.
    """
    for name, value in refused.items():
        known = _OF_THE_OP.get(name)
        if known is None:
            raise TypeError(f"{OP}: got an unexpected argument {name!r}")
        if value is not known.default:
            raise ValueError(f"{OP}: {name} must be {known.default} where the vocabulary is sharded, got {value!r:.40}")
    if backend is not None:
        check_backend(OP, backend)
    shape = check_logits(OP, "target_logits", target_logits, least=1)
    if len(shape) != 3 or shape[1] < 1:
        raise shape_error(OP, "target_logits", "[batch, num_draft + 1, width]", target_logits)
    batch, rows, width = shape
    check_one_of(OP, "acceptance", acceptance, RULES)
    device, drafted = target_logits.device, (batch, rows - 1)
    params = check_params(OP, "params", params, batch, device)
    draft_params = check_params(OP, "draft_params", draft_params, batch, device)
    numbers = (uniform_samples, noise_keys, seeds, step, positions)
    noise, steps, one_step = noise_of(OP, acceptance, numbers, target_logits, batch, ROWS, (batch, rows))
    if noise[1] is None and acceptance != "greedy":
        check_certain(OP, acceptance, params, draft_params, LOSSLESS, noise)
    expected: list[Expected] = [("draft_tokens", draft_tokens, ID_DTYPES, DRAFTED, drafted)]
    if noise[1] is not None:
        expected.append(noise)
    if num_draft_tokens is not None:
        expected.append(("num_draft_tokens", num_draft_tokens, ID_DTYPES, ("batch",), (batch,)))
    check_draft(OP, target_logits, (DRAFTED, drafted), draft_logits, draft_probs, None, None, expected)
    if eos_token_ids is not None:
        check_eos(OP, eos_token_ids, device)
    if (named := backend or settings().backend) is not None:  # before any round: a rank without tiles would never ask
        implementation("shard_stats", None, named, device, OP)
    exchange = Exchange(group)
    layout = layout_of(exchange, width, widths, device)
    if acceptance in ("match", "greedy"):
        draft_logits = draft_probs = None
    cuts = cuts_of(GREEDY if acceptance == "greedy" else params, batch, layout.vocab)
    draft_cuts = cuts_of(SamplingParams() if draft_logits is None else draft_params, batch, layout.vocab)
    if seeds is not None:
        given = step if steps is None else steps
        if acceptance == "match":
            assert positions is not None
            noise_keys = make_noise_keys(seeds, positions, step=given)
        else:
            assert given is not None
            uniform_samples = make_uniform_samples(seeds, given, rows)
    dense = [x for x in (target_logits, draft_logits, draft_probs) if x is not None]
    shard = Shard(exchange, layout, backend)
    own = iter(own_tiles(exchange, layout, dense))
    asked = ShardedCall(
        shard, next(own), draft_tokens, None if draft_logits is None else next(own),
        None if draft_probs is None else next(own), uniform_samples, noise_keys, params, draft_params, acceptance,
        num_draft_tokens, eos_token_ids,
    )  # fmt: skip
    with unchecked():  # the ops within see rows that nobody asked about
        out = verify_in_groups(asked, cuts, draft_cuts)
    raise_for_status(OP, out.status)
    return out
