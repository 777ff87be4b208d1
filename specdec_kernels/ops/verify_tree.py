"""`verify_tree`: accept a path of a token tree and draw the token after it."""

from __future__ import annotations

import math
import sys

import torch
from torch import Tensor

from ..checks import ID_DTYPES, check_instance, check_is_number, check_one_of, shape_error
from ..flat import LOSSLESS
from ..laws import TargetLaw
from ..processors import Processors
from ..sampling import SamplingParams
from ..tree import DraftTree
from ..types import RowStats, TokenMap, VerifyOutput
from ._common import Expected, check_params, check_processors, check_rows, define, dispatch, raise_for_status
from ._random import noise_of
from ._verify import check_certain, check_draft, check_draft_for_law, check_eos, check_target_probs
from .arguments import TREE_ACCEPTANCES, VerifyTreeArguments

NEED_DRAFT = ("recursive", "traversal")


def _fake(args: VerifyTreeArguments) -> tuple[Tensor, ...]:
    like, batch, max_depth = args.node_tokens, args.node_tokens.shape[0], args.max_depth
    return (
        like.new_empty((batch, max_depth + 1), dtype=torch.int64),
        *(like.new_empty((batch,), dtype=torch.int32) for _ in range(3)),
        like.new_empty((batch, max_depth), dtype=torch.int64),
    )


_op, _call = define(
    "verify_tree",
    VerifyTreeArguments,
    "(Tensor tokens, Tensor num_accepted, Tensor num_tokens, Tensor status, Tensor accepted_nodes)",
    _fake,
)


EPSILON, DELTA = 0.09, 0.3  # of "typical", as in Medusa: delta is the square root of epsilon
LARGEST = torch.finfo(torch.float32).max


def check_thresholds(caller: str, epsilon: float, delta: float) -> tuple[float, float]:
    """Both as backends take them (infinite above float32's range); raises unless they are numbers >= 0."""
    if type(epsilon) is float and type(delta) is float and 0 <= epsilon <= LARGEST and 0 <= delta <= LARGEST:
        return epsilon, delta
    for name, value in (("epsilon", epsilon), ("delta", delta)):
        check_is_number(caller, name, value)
        if not value >= 0:
            raise ValueError(f"{caller}: {name} must be a number >= 0, got {value}")
        if sys.float_info.max < value != math.inf:
            raise ValueError(f"{caller}: {name} must be a number in [0, 1.8e308] or infinity, got a larger integer")
    return (epsilon if epsilon <= LARGEST else math.inf), (delta if delta <= LARGEST else math.inf)


def verify_tree(
    target_logits: Tensor | None,
    tree: DraftTree,
    node_tokens: Tensor,
    draft_logits: Tensor | None = None,
    *,
    target_probs: Tensor | None = None,
    draft_probs: Tensor | None = None,
    acceptance: str = "sample",
    target_law: TargetLaw | None = None,
    epsilon: float = EPSILON,
    delta: float = DELTA,
    params: SamplingParams | None = None,
    draft_params: SamplingParams | None = None,
    processors: Processors | None = None,
    draft_stats: RowStats | None = None,
    draft_token_map: TokenMap | None = None,
    eos_token_ids: Tensor | None = None,
    uniform_samples: Tensor | None = None,
    noise_keys: Tensor | None = None,
    seeds: Tensor | None = None,
    step: int | Tensor | None = None,
    positions: Tensor | None = None,
    backend: str | None = None,
) -> VerifyOutput:
    """Accept a path of each drafted tree, from the root down, and draw the one token after it.

    With P and Q the target's and the draft's distributions of the token after a node:

    - "sample": draw y from P at the root; while y is a child's token, go there and draw again. Lossless whatever the
      tokens are, and reads only the rows on the way (except in Triton's kernels, which read all rows at once);
    - "greedy", "match": the same with P's argmax, or with y drawn with the node's Gumbel noise: the output of plain
      greedy decoding, or of plain sampling with these keys;
    - "recursive": siblings drawn from Q without replacement (`sample` with ``num_samples``, in the order drawn) are
      tried in turn: accept with ``min(1, P(x) / Q(x))``, else P becomes ``norm((P − Q)+)`` and x leaves Q. Lossless
      (Miao et al., arXiv 2305.09781; without replacement: Chen et al., arXiv 2402.12374);
    - "traversal": the same children, but from the leaves up, as block verification does in a chain. Lossless (Weng et
      al., arXiv 2505.12398);
    - "typical": accept x iff ``p(x) > min(ε, δ exp(−H(p)))`` with p the target's distribution at the sampling
      temperature, before any truncation, and H its entropy in nats; the longest path wins, of equally long ones the
      likelier. Not lossless (Cai et al., arXiv 2401.10774, section 2.3.1).

    The final token is drawn from what P has become, after truncation, at the last accepted node.

    "recursive" and "traversal" need draft noise that is fresh at every step, and different for each node:
    ``noise_keys(seeds, tree, step=step)``. Keys by position would give the children of siblings the same noise, and
    "traversal", which looks at both before it decides, would no longer be lossless.

    Parameters
    ----------
    target_logits : Tensor or None
        ``[batch, num_nodes, vocab]`` float32, bfloat16 or float16: row i is for the token after node i. Any
        leading strides, contiguous in the last dimension.
    tree : DraftTree
        One for the batch, or one for each sequence.
    node_tokens : Tensor
        ``[batch, num_nodes]`` int32 or int64 target ids. Node 0 is the root, whose token was emitted before: −1 there
        makes an idle row, which emits nothing. A −1 elsewhere is a node that this sequence does not have.
    draft_logits : Tensor, optional
        ``[batch, num_nodes, vocab_draft]`` float32, bfloat16 or float16, contiguous in the last dimension: row i is
        what node i's children were drawn from. A `target_law` needs it; "recursive" and "traversal" need it or
        `draft_probs`. "greedy", "match", "typical", and "sample" without a law, do not look at the draft's rows.
    target_probs : Tensor, optional
        Instead of `target_logits` (None): the same as float32 probabilities, as in `verify_chain`. Not with acceptance
        "match" or "typical".
    draft_probs : Tensor, optional
        Instead of `draft_logits`: the same as float32 probabilities, normalised.
    acceptance : {"sample", "greedy", "match", "typical", "recursive", "traversal"}
        The rule.
    target_law : one of `sk.laws`, optional
        A cascade for "sample": its distribution π takes the place of P at nodes that have children, and with
        ``bonus="cascade"`` at all nodes.
    epsilon, delta : float
        Of "typical": ε and δ, >= 0; infinity is allowed.
    params, draft_params : SamplingParams, optional
        Of target and draft. `draft_params` must match how the children were drawn. None: temperature 1, nothing cut.
    processors : Processors, optional
        Masks, biases and penalties, which act on the target's logits before `params`; a node's row also counts the
        tokens of the node and its ancestors. The draft's logits are left as they are: with a `target_law`, barred ids
        can be emitted where the draft's token is kept.
    draft_stats : RowStats, optional
        Stats of the draft rows, kept from drafting.
    draft_token_map : TokenMap, optional
        Maps a reduced draft vocabulary to target ids.
    eos_token_ids : Tensor, optional
        ``[num_eos]`` int64: an EOS ends its branch, and nothing is drawn after an accepted one.
    uniform_samples : Tensor, optional
        ``[batch, num_nodes]`` float64 or float32 in [0, 1). "sample": column i draws the token after node i. Other
        rules: column 0 draws the final token, and column i is the coin of node i. Needed unless the rule is "greedy" or
        "match", `seeds` are given, or ``params.temperature`` is the number 0 (with a `target_law`, that of
        `draft_params` too); refused with "match" or `seeds`; "greedy" checks them but does not use them.
    noise_keys : Tensor, optional
        ``[batch, num_nodes]`` int64, from `noise_keys` at the positions of the tokens after the nodes. Needed by
        "match" unless `seeds` are given or ``params.temperature`` is the number 0; refused with any other rule or
        `seeds`.
    seeds : Tensor, optional
        ``[batch]`` int64, instead of both: each number is computed where it is needed, and is that of
        ``uniform_samples(seeds, step, num_nodes)``, or for "match" of ``noise_keys(seeds, positions, step=step)``.
    step : int or Tensor, optional
        Only with `seeds`, which need it (optional for "match"): the verify step, >= 0, or ``[batch]`` int64 on the
        device.
    positions : Tensor, optional
        Only with `seeds` and "match", which needs them: ``[batch, num_nodes]`` int32 or int64: the absolute position of
        the token after each node, i.e. the number of tokens so far, root included, + ``tree.position_ids``.
    backend : str, optional
        "reference", "cpu", "triton" or "cuda"; None: that of ``SPECDEC_BACKEND``, else the best one for the device.

    Returns
    -------
    VerifyOutput
        tokens ``[batch, max_depth + 1]`` int64: the accepted nodes' tokens, then the final one, then −1; num_accepted
        (without the root), num_tokens and status ``[batch]`` int32; accepted_nodes ``[batch, max_depth]`` int64, −1
        padded.

    Raises
    ------
    TypeError, ValueError
        A wrong dtype, shape, stride, device or combination, or a backend that cannot run here; before any work. What
        only the values show sets ``status`` instead. "recursive" and "traversal" skip a child that its draft cannot
        have drawn, and set `Status.BAD_DRAFT`: a duplicate, or one where Q is 0 or not a distribution (see
        `verify_chain`). A `target_law` sets it where Q is not a distribution, and uses P there.
    RuntimeError
        A status is set while ``SPECDEC_CHECK=1``; after the work.
    """
    op = "verify_tree"
    target, name, rows = check_rows(op, "target_logits", target_logits, target_probs)
    if len(rows) != 3:
        raise shape_error(op, name, "[batch, num_nodes, vocab]", target)
    batch, num_nodes, _ = rows
    device, nodes = target.device, (("batch", "num_nodes"), (batch, num_nodes))
    check_instance(op, "tree", tree, DraftTree, "a DraftTree")
    links = tree.links
    trees = links.shape  # [3, num_nodes] or [3, batch, num_nodes]
    if trees[-1] != num_nodes or (len(trees) == 3 and trees[1] != batch):
        raise shape_error(op, "tree", f"of num_nodes={num_nodes}, one or batch={batch} of them", tree.parents)
    if links.device != device:
        raise ValueError(f"{op}: tree must be on {device}, got {links.device}")
    check_one_of(op, "acceptance", acceptance, TREE_ACCEPTANCES)
    rule = TREE_ACCEPTANCES[acceptance]
    epsilon, delta = check_thresholds(op, epsilon, delta)
    law = LOSSLESS
    if target_law is not None:
        check_draft_for_law(op, "token", target_law, draft_logits, draft_token_map)
        if acceptance != "sample" or not target_law.is_cascade:
            raise ValueError(
                f"{op}: target_law must be None or a cascade with acceptance='sample', got {target_law!r} with "
                f"acceptance={acceptance!r}"
            )
        law = target_law.flat()
    if acceptance in NEED_DRAFT and draft_logits is None and draft_probs is None:
        raise ValueError(f"{op}: acceptance={acceptance!r} needs draft_logits or draft_probs, got neither")
    params = check_params(op, "params", params, batch, device)
    draft_params = check_params(op, "draft_params", draft_params, batch, device)
    if target_probs is not None:
        check_target_probs(op, acceptance, params, processors, target_law)
    numbers = (uniform_samples, noise_keys, seeds, step, positions)
    noise, steps, step = noise_of(op, acceptance, numbers, target, batch, *nodes)
    given = None if processors is None else check_processors(op, processors, target, nodes[0], batch)
    expected: list[Expected] = [("node_tokens", node_tokens, ID_DTYPES, *nodes)]
    if noise[1] is not None:
        expected.append(noise)
    values, argmax, status, target_to_draft = check_draft(
        op, target, nodes, draft_logits, draft_probs, draft_stats, draft_token_map, expected
    )
    if noise[1] is None and acceptance != "greedy":
        check_certain(op, acceptance, params, draft_params, law, noise)
    if eos_token_ids is not None:
        check_eos(op, eos_token_ids, device)
    out = _call(
        dispatch(op, _op, backend, device),
        target_logits=target, draft_logits=draft_logits, draft_probs=draft_probs, draft_values=values,
        draft_argmax=argmax, draft_status=status, target_to_draft=target_to_draft, uniform_samples=uniform_samples,
        noise_keys=noise_keys, seeds=seeds, steps=steps, positions=positions, step=step,
        eos_token_ids=eos_token_ids, processors=given, law=law, params=params, draft_params=draft_params,
        node_tokens=node_tokens, links=tree.links, tree_status=tree.status, max_depth=tree.max_depth,
        acceptance=rule, epsilon=epsilon, delta=delta, target_probs=target_probs is not None,
    )  # fmt: skip
    tokens, num_accepted, num_tokens, status, accepted_nodes = out
    raise_for_status(op, status)
    return VerifyOutput(tokens, num_accepted, num_tokens, status, None, accepted_nodes)
