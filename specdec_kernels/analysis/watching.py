"""A generation watched step by step: the acceptance of every draft token, and where the time goes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..checks import check_callable, check_flag, check_instance
from ..decoding.arguments import check_own_runner
from ..decoding.claims import claimed
from ..decoding.costs import CostTable
from ..decoding.generate import generate
from ..decoding.launching import masked, synchronize
from ..decoding.output import GenerationOutput
from ..decoding.request import DRAFT_LENGTH
from ..decoding.runner import Prompt, Runner
from ..decoding.state import DecodingState, StepResult
from ..drafters.base import Draft, Drafter, TreeDrafter
from ..integrations.runners import as_runner
from ..ops.verify_chain import verify_chain
from ..ops.warp_probs import warp_probs
from ..tree import DraftTree
from ..types import RowStats

Clock = Callable[[], float]


@dataclass(frozen=True, eq=False)
class Watched:
    """What `watch` saw.

    Attributes
    ----------
    output : GenerationOutput
        What `generate` returned. Its own times include the watching.
    acceptance : ndarray
        ``[num_steps, longest]`` float64, a row for each step of each sequence that had room for a draft, `longest` the
        most draft tokens that one had room for: the probability that the draft token at the position is accepted, ``Σ_v
        min(P(v), Q(v))`` (corollary 3.6 of arXiv 2211.17192); for a tree, that one of the node's children is. −1 where
        the drafter had nothing to propose; NaN where the step did not get to, because a token before was rejected or
        the answer's end left no room.
    sequence : ndarray
        ``[num_steps]`` int64: whose step it was, of the batch.
    rows : ndarray
        ``[forwards]`` int64: rows a sequence of each forward of the target.
    seconds : ndarray
        ``[forwards, 3]`` float64, of the clock: drafting, the target's forward, and the rest of each step of the batch
        (verification, the loop).
    """

    output: GenerationOutput
    acceptance: NDArray[np.float64]
    sequence: NDArray[np.int64]
    rows: NDArray[np.int64]
    seconds: NDArray[np.float64]


def watch(
    model: Any, input_ids: Tensor, *, drafter: Drafter, clock: Clock = time.perf_counter, acceptances: bool = True,
    **options: Any,
) -> Watched:  # fmt: skip
    """`generate`, watched; the tokens are the same.

    Steps are launched one by one, without CUDA graphs.

    Parameters
    ----------
    model, input_ids, drafter
        As of `generate`.
    clock : callable
        Seconds from any origin: `time.perf_counter`, or `time.process_time` for the processor time of all threads,
        which a busy machine changes less.
    acceptances : bool
        False: time alone, and `Watched.acceptance` has no rows.
    **options
        More arguments of `generate`; `num_speculative_tokens` is 5 by default. With `acceptance` "token" (the
        default) and "greedy", what is measured is what counts, `processors` and `grammar` included; other rules, and a
        `target_law`, accept with other probabilities.

    Raises
    ------
    ValueError, TypeError
        As `generate`; `num_speculative_tokens` that is "auto", whose own measurements watching would disturb, or a
        `CostTable`; processors or a grammar where acceptances of a `TreeDrafter` are watched.
    """
    wanted = options.setdefault("num_speculative_tokens", DRAFT_LENGTH)
    if wanted == "auto" or isinstance(wanted, CostTable):
        raise ValueError(f"watch: num_speculative_tokens must be an integer, got {wanted!r}")
    check_instance("watch", "drafter", drafter, Drafter, "a Drafter (NoDrafter() for none)")
    check_callable("watch", "clock", clock)
    check_flag("watch", "acceptances", acceptances)
    unwatched = [name for name in ("processors", "grammar") if options.get(name) is not None]
    if isinstance(drafter, TreeDrafter) and acceptances and unwatched:
        raise ValueError(f"watch: {unwatched[0]} must be None with a drafter of trees, unless acceptances is False")
    runner = as_runner(model, "watch")
    check_own_runner("watch", runner, drafter)
    log = _Log(clock, runner.device, acceptances)
    kind = _WatchedTreeDrafter if isinstance(drafter, TreeDrafter) else _WatchedDrafter
    watched = type(type(drafter).__name__, (kind,), {})(drafter, log)  # messages name the drafter
    with claimed("watch", drafter=drafter, model=runner):
        output = generate(_WatchedRunner(runner, log), input_ids, drafter=watched, **options)
    deepest = max(map(len, log.acceptance), default=0)
    rows = [np.pad(row, (0, deepest - len(row)), constant_values=np.nan) for row in log.acceptance]
    return Watched(
        output,
        np.array(rows).reshape(len(rows), deepest),
        np.array(log.sequence, dtype=np.int64),
        np.array(log.rows, dtype=np.int64),
        np.array(log.seconds).reshape(-1, 3),
    )


class _Log:
    """What the two wrappers tell each other of the step under way, and of those before it."""

    def __init__(self, clock: Clock, device: torch.device, acceptances: bool) -> None:
        self._clock, self._device, self.acceptances = clock, device, acceptances
        self.acceptance: list[NDArray[np.float64]] = []
        self.sequence: list[int] = []
        self.rows: list[int] = []
        self.seconds: list[tuple[float, float, float]] = []
        self.state: DecodingState | None = None
        self.draft: Draft | None = None
        self.overlap: NDArray[np.float64] | None = None  # [batch, width] of the step under way
        self.tree_logits: Tensor | None = None
        self._drafting = self._forward = self._watching = 0.0
        self._began = 0.0

    def now(self) -> float:
        synchronize(self._device)
        return self._clock()

    def begin_decoding(self) -> None:
        self._began = self.now()

    def timed(self, part: str, call: Callable[[], Any]) -> Any:
        """What `call` returns; its time counts as that part's."""
        began = self.now()
        result = call()
        setattr(self, part, getattr(self, part) + self.now() - began)
        return result

    def end_step(self, result: StepResult) -> None:
        """Note the step that `result` is of."""
        ended = self.now()
        rest = ended - self._began - self._drafting - self._forward - self._watching
        self.seconds.append((self._drafting, self._forward, rest))
        if self.acceptances:
            self._note(result)
        self.draft, self.overlap = None, None
        self._drafting = self._forward = self._watching = 0.0
        self._began = self.now()

    def _note(self, result: StepResult) -> None:
        assert self.state is not None
        for b in np.flatnonzero(result.num_drafted >= 0):
            room = int(self.state.host_limits[b])
            if room == 0:
                continue
            accepted, drafted = int(result.num_accepted[b]), int(result.num_drafted[b])
            row = np.full(room, np.nan)
            reached = min(accepted + 1, room)
            if result.num_tokens[b] == accepted:  # the text ended with an accepted token
                reached = accepted
            if reached == 0:  # `stop` kept nothing of the step
                continue
            row[:reached] = -1.0
            known = min(reached, drafted)
            if known:
                assert self.overlap is not None
                row[:known] = self.overlap[b, :known]
            self.acceptance.append(row)
            self.sequence.append(int(b))


class _WatchedRunner(Runner):
    """A target that notes what it is asked."""

    def __init__(self, inner: Runner, log: _Log) -> None:
        self._inner, self._log = inner, log
        for name in Runner.__annotations__:
            if name not in ("capturable", "gives_rows"):  # its notes are taken on the host, of steps without prompts
                setattr(self, name, getattr(inner, name))

    def start(self, prompt: Prompt, capacity: int) -> None:
        self._inner.start(prompt, capacity)

    def prefill(self, prompt: Prompt) -> None:
        self._inner.prefill(prompt)
        self._log.begin_decoding()

    def expect(self, real: Callable[[], Tensor]) -> None:
        self._inner.expect(real)

    def forward(self, tokens: Tensor, starts: Tensor, bound: int, need_logits: bool = True) -> Tensor | None:
        log = self._log
        logits: Tensor | None = log.timed("_forward", lambda: self._inner.forward(tokens, starts, bound, need_logits))
        log.rows.append(tokens.shape[1])
        if log.acceptances and log.draft is not None and log.draft.tokens.shape[1]:
            log.timed("_watching", lambda: self._overlap(logits))
        return logits

    def forward_tree(self, tokens: Tensor, starts: Tensor, tree: DraftTree, bound: int) -> tuple[Tensor, Tensor | None]:
        log = self._log
        logits, hidden = log.timed("_forward", lambda: self._inner.forward_tree(tokens, starts, tree, bound))
        log.rows.append(tokens.shape[1])
        log.tree_logits = logits
        return logits, hidden

    def keep_path(self, accepted_nodes: Tensor, starts: Tensor) -> None:
        log = self._log
        log.timed("_forward", lambda: self._inner.keep_path(accepted_nodes, starts))
        if log.acceptances and log.draft is not None:
            log.timed("_watching", lambda: self._overlap_of_tree(accepted_nodes))

    def finish(self) -> None:
        self._inner.finish()

    def costs_as(self) -> tuple[object, Any]:
        return self._inner.costs_as()

    def _overlap(self, logits: Tensor | None) -> None:
        """``Σ min(P, Q)`` at each position of a chain."""
        log = self._log
        state, draft = log.state, log.draft
        assert state is not None and draft is not None and logits is not None
        state, draft = masked(state, draft)
        width = draft.tokens.shape[1]  # the target's rows are padded to few widths, a cascade's draft has one more

        def cut(rows: Tensor | None) -> Any:
            return None if rows is None else rows[:, :width].contiguous()

        stats = draft.stats and RowStats(*(cut(part) for part in draft.stats))
        out = verify_chain(
            logits[:, : width + 1], draft.tokens, cut(draft.logits), seeds=state.seeds, step=0,
            params=state.effective_sampling, processors=state.processors, draft_params=draft.params,
            draft_probs=cut(draft.probs), draft_stats=stats, draft_token_map=draft.token_map,
            num_draft_tokens=draft.num_draft_tokens, return_acceptance=True,
        )  # fmt: skip
        assert out.acceptance is not None
        log.overlap = out.acceptance.double().clamp(0, 1).cpu().numpy()  # a float32 sum may exceed 1

    def _overlap_of_tree(self, accepted_nodes: Tensor) -> None:
        """P of all children together, at the root and at each accepted node."""
        log = self._log
        state, draft, logits = log.state, log.draft, log.tree_logits
        assert state is not None and draft is not None and logits is not None and draft.tree is not None
        batch, nodes, _ = logits.shape
        parents = draft.tree.parents.expand(batch, nodes)
        tokens = torch.cat([torch.full_like(draft.tokens[:, :1], -1), draft.tokens], dim=1)
        probs = warp_probs(logits, state.effective_sampling)
        from_parent = probs[
            torch.arange(batch, device=probs.device)[:, None], parents.clamp(min=0), tokens.clamp(min=0)
        ].double()
        from_parent = from_parent.masked_fill((tokens < 0) | (parents < 0), 0.0)
        of_children = torch.zeros(batch, nodes, dtype=torch.float64, device=logits.device)
        of_children.scatter_add_(1, parents.clamp(min=0), from_parent)
        path = torch.cat([torch.zeros_like(accepted_nodes[:, :1]), accepted_nodes], dim=1)
        log.overlap = of_children.gather(1, path.clamp(min=0)).clamp(max=1.0).cpu().numpy()


class _WatchedDrafter(Drafter):
    """A drafter whose proposals are noted."""

    def __init__(self, inner: Drafter, log: _Log) -> None:
        self._inner, self._log = inner, log
        self.gives_logits, self.runner = inner.gives_logits, inner.runner
        self.token_map = getattr(inner, "token_map", None)

    def start(self, state: DecodingState) -> None:
        self._inner.start(state)

    def prepare(self, state: DecodingState) -> None:
        self._log.timed("_drafting", lambda: self._inner.prepare(state))

    def propose(self, state: DecodingState, num_tokens: int) -> Draft:
        draft: Draft = self._log.timed("_drafting", lambda: self._inner.propose(state, num_tokens))
        self._log.state, self._log.draft = state, draft
        return draft

    def commit(self, state: DecodingState, result: StepResult) -> None:
        self._log.timed("_drafting", lambda: self._inner.commit(state, result))
        if self._log.draft is None:  # a step that did not ask for a draft
            self._log.state = state.at_step(np.zeros(state.batch_size, dtype=np.int64), state.longest)
        self._log.end_step(result)

    def finish(self) -> None:
        self._inner.finish()


class _WatchedTreeDrafter(_WatchedDrafter, TreeDrafter):
    """The same for trees."""

    def __init__(self, inner: TreeDrafter, log: _Log) -> None:
        super().__init__(inner, log)
        self.num_nodes, self.max_depth, self.reads_hidden = inner.num_nodes, inner.max_depth, inner.reads_hidden


class Unlikely(Drafter):
    """Proposes ids that no text has in this order, to measure what verifying a draft costs, whatever drafts."""

    def start(self, state: DecodingState) -> None:
        """Nothing to prepare."""

    def propose(self, state: DecodingState, num_tokens: int) -> Draft:
        """One-hot drafts."""
        return Draft((state.last_tokens() + torch.arange(1, num_tokens + 1, device=state.device)) % state.vocab_size)

    def commit(self, state: DecodingState, result: StepResult) -> None:
        """Nothing to note."""
