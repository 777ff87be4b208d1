"""How far each decision of a verify step is from its nearest flip: what tells a tie of rounding from a fault.

The unit is that of logits divided by the temperature, the natural logarithm of a weight. Let each weight ``exp(logit /
temperature)`` of target and draft, and each sum of weights, be off by any factor between ``exp(−m)`` and ``exp(m)``;
given probabilities are weights that stay normalised. A margin is a bound: for an m below it, no such error can flip the
decision. So it covers logits that each move by less than m temperatures (m itself at temperature 0), which move each
sum by no more, and arithmetic with a relative error of less than m in weights and sums.

The bounds come from interval arithmetic in ``backends/reference/intervals.py``. What they are for each decision:

- a coin: u Q(x) < P(x) flips only where ``|log P(x) / (u Q(x))| <= 4m``, as a probability is a weight divided by a sum;
  for a draft without logits ``2m``;
- a draw by a uniform u: only where a running sum C beside the token's id has ``|log C / (u · total)| <= 2m``; for a
  draw from the residual after a rejection, only where that holds for some P and Q within those factors;
- an argmax, of logits or with noise: only where the second is within 2m of the first;
- a cut by top-k, top-p or min-p: an id that is (for top-p: whose sums are) within 2m of a border counts in the upper
  ends of the intervals and not in the lower ones, so that it matters as much as its probability;
- the block rule: its weights w and thresholds h, whose intervals widen by 4m a position. An accepted token is sure as
  long as any later coin accepts for sure; the final one as long as no later coin may, and its own draw is;
- children of a tree's node: the coins of all that were tried, against ends of ``norm((w P − Q)+)`` and of Q without
  them, which widen with each rejection. With "traversal" an accepted node is sure as long as no coin outside its
  subtree may accept first, and some coin inside accepts for sure;
- typical acceptance: p against ``min(ε, δ exp(−H))``, H from the ends of each id's −p log p. A node is sure as long as
  no path that may be accepted, and may be the longest and likeliest, passes it by;
- a target law: an id (or a row) whose deferral may flip counts in the upper ends and not in the lower ones. A deferral
  stays as long as the law decides alike at the ends of all that it looks at.

Intervals ignore correlations, so a margin may be several times too small, but never too large.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .backends.reference import margins as reference
from .backends.reference import tree_margins
from .checks import INT64, check_given
from .ops._common import Instead
from .ops.sample import sample
from .ops.verify_chain import verify_chain
from .ops.verify_packed import verify_packed
from .ops.verify_tree import verify_tree

OF: dict[Callable[..., Any], Callable[[Any], tuple[Tensor, ...]]] = {
    verify_chain: reference.verify_chain,
    verify_packed: reference.verify_chain,
    verify_tree: tree_margins.verify_tree,
    sample: reference.sample,
}


class Margins(NamedTuple):
    """What float64 decides, and how far that is from its nearest flip.

    Attributes
    ----------
    tokens : Tensor
        int64, as the op gives them: ``[batch, num_draft + 1]`` or ``[batch, max_depth + 1]`` with −1 after the last
        token, or the shape of `sample`'s.
    margins : Tensor
        float64 of the same shape, >= 0, in nats (a difference of logits, over the temperature): 0 below 2⁻⁴⁰, +inf
        above 32 and where there is no token. Each is for its token's own decision: an error smaller than it and all
        margins before it leaves the tokens up to it unchanged. Where several samples exhausted a row's ids, that is a
        decision too, since an error may keep another id.
    """

    tokens: Tensor
    margins: Tensor

    def of_difference(self, tokens: Tensor) -> Tensor:
        """How small an error explains that a backend's verify step gave `tokens` and not these.

        Parameters
        ----------
        tokens : Tensor
            int64, of the shape of ``self.tokens``.

        Returns
        -------
        Tensor
            ``[batch]`` (or ``[batch, n]``) float64: the smallest margin up to the first token that differs; 0 where
            none does. With one sample per row each token is decided by itself: there its own margin counts, in the
            shape of `tokens`.

        Raises
        ------
        TypeError, ValueError
            A wrong dtype, shape or device.
        """
        names = ("batch", *("n",) * (self.tokens.dim() - 2), "max_tokens")
        differs = self._differing(tokens, names)
        if not differs.shape[-1]:
            return self.margins.new_zeros(differs.shape[:-1])
        upto = self.margins.cummin(-1).values.gather(-1, differs.int().argmax(-1, keepdim=True))[..., 0]
        return torch.where(differs.any(-1), upto, 0.0)

    def _differing(self, tokens: Tensor, names: tuple[str, ...]) -> Tensor:
        shape = tuple(self.tokens.shape)
        check_given("Margins.of_difference", "tokens", tokens, INT64, self.tokens.device, names, shape)
        return tokens != self.tokens


class _OfRows(Margins):
    """For one sample per row, each of which is decided by itself."""

    def of_difference(self, tokens: Tensor) -> Tensor:
        differs = self._differing(tokens, ("batch", "n")[: self.tokens.dim()])
        return torch.where(differs, self.margins, 0.0)


def decision_margins(verify: Callable[..., Any], *arguments: Any, **named: Any) -> Margins:
    """Decide a call of `verify_chain`, `verify_packed`, `verify_tree` or `sample` in float64, and say how near each
    decision was.

    ``sk.decision_margins(sk.verify_chain, target_logits, draft_tokens, …)`` takes a call as it stands, with any draft,
    rule, target law, processors and parameters, and runs it in plain torch, wherever the tensors are. Where a backend
    gave another token, the margin tells whether that was a rounding tie: if so, it is of the size of the rounding
    error, some 1e-6 in float32. A token's margin covers what its decision depends on: of an accepted draft token the
    coin; of a recovered token that coin and the draw; of a bonus token the draw, if it is not given; in "block" also
    the coins of later positions that could have changed the length; in "match" and "greedy" the second best id. Of
    several samples, each is the best of what those before it leave. On a tree the coins of the siblings tried before
    count too, in "traversal" those of all nodes left before, in "typical" all paths that could have won. An id near a
    cut by top-k, top-p or min-p counts by its probability, and so does one near a target law's border. Equal logits are
    a tie, although every backend breaks it in the same way.

    This is a diagnostic: each margin is found by bisection, which reads the rows a dozen times. At most 2²⁰ logits, or
    those of one sequence, are held in float64 at a time; packed and indexed rows are copied first.

    Parameters
    ----------
    verify : callable
        `verify_chain`, `verify_packed`, `verify_tree`, or `sample`.
    *arguments, **named
        What it is called with. `backend` and `return_acceptance` change nothing; `draft_stats` are not read (they are
        those of the draft's rows).

    Returns
    -------
    Margins
        tokens and margins, both of the shape of the call's tokens.

    Raises
    ------
    TypeError, ValueError
        Another function, and what the function itself refuses, in its own words.
    RuntimeError
        A status is set while ``SPECDEC_CHECK=1``; after the work.
    """
    run = OF.get(verify) if inspect.isfunction(verify) else None
    if run is None:
        names = ", ".join(function.__name__ for function in OF)
        raise TypeError(f"decision_margins: verify must be one of {names}, got {verify!r}")
    found: list[Tensor] = []
    kind = Margins

    def take(args: Any) -> tuple[Tensor, ...]:
        nonlocal kind
        if verify is sample and args.num_samples == 1:
            kind = _OfRows
        *given, margins = run(args)
        found.extend((given[0], margins))
        return tuple(given)

    verify(*arguments, **{**named, "backend": Instead(take)})
    return kind(*found)
