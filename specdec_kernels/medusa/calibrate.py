"""How often each head's tokens are right, on text that it has not been trained on."""

from __future__ import annotations

import torch
from torch import Tensor

from ..checks import FLOAT_DTYPES, check_instance, check_int, check_tensor
from ..drafters.medusa_heads import MedusaHeads
from .data import Features


@torch.inference_mode()
def count_accuracy(heads: MedusaHeads, features: Features, ranks: int = 10, batch_size: int = 512) -> Tensor:
    """For each head and rank, the share of tokens that the head's token of this rank gets right.

    Parameters
    ----------
    heads : MedusaHeads
    features : Features
        Of held-out text.
    ranks : int
        1 to the size of the reduced vocabulary.
    batch_size : int
        Positions that run through the heads at once, >= 1.

    Returns
    -------
    Tensor
        ``[heads, ranks]`` float64 on the CPU. Tokens outside the reduced vocabulary count as missed.

    Raises
    ------
    TypeError, ValueError
        Another type; text too short to have a token for the last head; `ranks` or `batch_size` out of range.
    """
    check_instance("count_accuracy", "heads", heads, MedusaHeads, "MedusaHeads")
    check_instance("count_accuracy", "features", features, Features, "Features")
    check_int("count_accuracy", "ranks", ranks, 1, None)
    if ranks > len(heads.token_map):
        raise ValueError(f"count_accuracy: ranks must be in [1, vocab_draft={len(heads.token_map)}], got {ranks}")
    check_int("count_accuracy", "batch_size", batch_size, 1, None)
    labels = features.labels(heads.num_heads).cpu()
    counted = (labels >= 0).sum(0)
    if not bool((counted > 0).all()):
        raise ValueError(f"count_accuracy: features must have a token for each of {heads.num_heads} heads, got none")
    hits = torch.zeros(heads.num_heads, ranks, dtype=torch.int64, device="cpu")
    for i in range(0, len(labels), batch_size):
        rows = features.hidden[i : i + batch_size].to(heads.w1.weight.device)
        found = heads.top_tokens(rows, ranks).cpu()
        hits += (found == labels[i : i + batch_size, :, None]).sum(0)
    return hits.double() / counted[:, None]


def falling(accuracy: Tensor) -> Tensor:
    """`accuracy`, with no rank better than one before it, as `DraftTree.calibrated` needs it: where few tokens were
    counted, a late rank may by chance have had a few hits more.

    Raises
    ------
    TypeError
        Not a tensor of floats.
    """
    check_tensor("falling", "accuracy", accuracy, FLOAT_DTYPES, None)
    return accuracy.cummin(dim=-1).values
