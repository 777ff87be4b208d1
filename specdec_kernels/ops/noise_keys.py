"""`noise_keys`: what the Gumbel noise of a position is computed from."""

from __future__ import annotations

import torch
from torch import Tensor

from ..checks import ID_DTYPES, check_tensor, shape_error
from ..tree import DraftTree
from ._common import define, dispatch
from ._random import check_seeds, purpose_code, split_step
from .arguments import NoiseKeysArguments


def _fake(args: NoiseKeysArguments) -> Tensor:
    return args.seeds.new_empty(args.positions.shape)


_op, _call = define("noise_keys", NoiseKeysArguments, "Tensor", _fake)


def noise_keys(
    seeds: Tensor,
    positions: Tensor | DraftTree,
    purpose: str | None = None,
    step: int | Tensor | None = None,
    *,
    backend: str | None = None,
) -> Tensor:
    """Keys of the noise at each position: Philox4x32-10 keyed by (seed, purpose, step, position).

    From a key, `sample` and ``verify_chain(acceptance="match")`` compute ``G(key, v) = −log(−log1p(−t))`` for every
    target id v, ``t = (philox(key, v div 4)[v mod 4] + 0.5) · 2**-32`` (where that word is below 2**16, words of
    another counter follow it; `specdec_kernels.testing.float64_gumbel` computes it all). The match rule and its drafter
    use the absolute position (counted without padding) and no step, so that they emit what plain sampling with the seed
    emits. Drafts for the rules "block", "recursive" and "traversal" need a step. Given a tree instead of positions, it
    makes the keys with which the nodes' children are drawn: one for each node, fresh at every step. (Keys by position,
    which nodes of the same depth share, would give the children of siblings the same noise.)

    Parameters
    ----------
    seeds : Tensor
        ``[batch]`` int64, one per sequence.
    positions : Tensor or DraftTree
        ``[batch, n]`` int32 or int64: the absolute position of the token that is drawn; or the tree that is drafted.
    purpose : {"sample", "draft", "accept", "final"}, optional
        Disjoint streams. None: "sample", or "draft" for a tree, which takes no other.
    step : int or Tensor, optional
        The verify step, where noise must be fresh at each step; >= 0, or ``[batch]`` int64. None, or a −1 in a tensor:
        a stream of its own; a tree needs a step.
    backend : str, optional
        "reference", "cpu", "triton" or "cuda"; None: that of ``SPECDEC_BACKEND``, else the best one for the device.

    Returns
    -------
    Tensor
        ``[batch, n]`` int64; for a tree ``[batch, num_nodes]``.

    Raises
    ------
    TypeError, ValueError
        A wrong dtype, shape, device or range, an unknown purpose, or a backend that cannot run here; before any work.
    """
    op = "noise_keys"
    check_seeds(op, seeds)
    if isinstance(positions, DraftTree):
        positions, purpose = _nodes(positions, seeds, purpose, step), "draft"
    check_tensor(op, "positions", positions, ID_DTYPES, seeds.device)
    if positions.dim() != 2 or positions.shape[0] != seeds.shape[0]:
        raise shape_error(op, "positions", f"[batch={seeds.shape[0]}, n]", positions)
    steps, scalar = (None, -1) if step is None else split_step(op, step, seeds)
    run = dispatch(op, _op, backend, seeds.device)
    code = purpose_code(op, "sample" if purpose is None else purpose)
    out: Tensor = _call(run, seeds=seeds, positions=positions, steps=steps, step=scalar, purpose=code)
    return out


def _nodes(tree: DraftTree, seeds: Tensor, purpose: str | None, step: object) -> Tensor:
    """A number for each node ``[batch, num_nodes]``."""
    if purpose not in (None, "draft"):
        raise ValueError(
            f"noise_keys: purpose must be 'draft' for a tree (\"match\" verifies by position), got {purpose!r}"
        )
    if step is None:
        raise ValueError("noise_keys: step must be given for a tree, whose noise is fresh at every step, got None")
    if tree.is_batched and tree.parents.shape[0] != seeds.shape[0]:
        raise shape_error("noise_keys", "seeds", f"[batch={tree.parents.shape[0]}]", seeds)
    return torch.arange(tree.num_nodes, device=seeds.device).expand(seeds.shape[0], -1)
