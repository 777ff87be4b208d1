"""Steps on a GPU: captured in CUDA graphs and replayed, so that a step costs one launch instead of thousands.

All that changes from step to step lies in tensors of `DecodingState`, which stay where they are: lengths, step
counters, what may still be emitted, which sequences are active. A finished sequence idles: it draws nothing and writes
nothing that counts. So the host need not know a step's outcome to launch the next. It fetches outcomes through pinned
memory, one step late where the drafter works on the device and the draft length is fixed; a last idle step is then
thrown away.

A graph is fixed to the number of draft tokens and to the rows of the cache that attention sees, the next power of two
that holds every sequence: a text that outgrows it has its step captured again. The first steps of each such shape, not
counting one that reads prompts, are ordinary ones on the side stream of the capture, which warms up everything that
torch sets up at first use; one of them runs under torch's check for synchronisations, because a capture that fails
midway leaves torch's allocator in disorder.
All graphs of a call share one memory pool: they run one after the other on one stream, and a later step needs nothing
of an earlier one except its outcome, which is kept.
"""

from __future__ import annotations

import logging
import threading
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import cycle
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..config import settings
from ..drafters.base import Draft, Drafter, TreeDrafter
from .launching import Steps
from .logprobs import numbers_of_token
from .runner import Runner
from .schedule import Schedule
from .state import OUTCOME_COLUMNS, DecodingState
from .step import verify_step

logger = logging.getLogger("specdec_kernels")

WARM_UP_STEPS = 2
"""Ordinary steps of a shape before it is captured; the last of them under the check for synchronisations."""
MIN_ROWS = 64
"""Rows of the cache that the first graph of a short text sees; later ones see twice, four times … as many."""

# torch allows one capture at a time in a process, and has one mode for synchronisations in all of it
_capturing = threading.Lock()
_WAITS = "synchronizing CUDA operation"  # part of torch's warning
_refusals: set[str] = set()


class _Streams:
    """Side streams, each used by one call at a time: whatever is launched on a stream during its capture is captured
    too.

    They are reused, as torch keeps memory for every stream ever used, and has 32 for each device, which it hands out in
    turn.
    """

    _MOST = 32

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: dict[torch.device, list[torch.cuda.Stream]] = {}
        self._taken: set[int] = set()

    def take(self, device: torch.device) -> torch.cuda.Stream | None:
        """One that no other call has; None where there is none."""
        with self._lock:
            free = self._free.setdefault(device, [])
            for _ in range(self._MOST):
                stream = free.pop() if free else torch.cuda.Stream(device)
                if stream.cuda_stream not in self._taken:
                    self._taken.add(stream.cuda_stream)
                    return stream
        return None

    def give_back(self, device: torch.device, stream: torch.cuda.Stream) -> None:
        with self._lock:
            self._taken.discard(stream.cuda_stream)
            self._free[device].append(stream)


_streams = _Streams()


def begin_steps(state: DecodingState, runner: Runner, drafter: Drafter, ends: Tensor | None) -> Steps:
    """The way of running steps that fits the device and the model; parameters as of `Steps`."""
    if not _is_cuda(state.device):
        return Steps(state, runner, drafter, ends)
    reason = None
    if state.masks is not None:
        reason = "a grammar looks at each draft on the host"
    elif settings().check:
        reason = "SPECDEC_CHECK=1 looks at the status of every op"
    elif not runner.capturable:
        reason = f"{runner.name} cannot be captured, or does not say that it can (Runner.capturable)"
    if reason is None and (stream := _streams.take(state.device)) is not None:
        try:
            return CapturedSteps(state, runner, drafter, ends, stream)
        except BaseException:  # there is no pinned memory left, say
            _streams.give_back(state.device, stream)
            raise
    _explain(reason or "as many other calls as torch has streams have theirs captured")
    return Steps(state, runner, drafter, ends)


def _is_cuda(device: torch.device) -> bool:
    return device.type == "cuda"


def refusals() -> list[str]:
    """Why steps were not captured, in this process or since `forget_refusals`."""
    return sorted(_refusals)


def forget_refusals() -> None:
    """So that each reason is logged again."""
    _refusals.clear()


def _explain(reason: str) -> None:
    """Log once a process and reason why steps are not captured."""
    if reason not in _refusals:
        _refusals.add(reason)
        logger.warning("generate: steps run op by op, not as a CUDA graph: %s", reason)


@dataclass(frozen=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    outcome: Tensor
    """``[batch, width + 6]`` int64, written by every replay."""


@dataclass(frozen=True)
class _Landing:
    """Where an outcome arrives on the host."""

    buffer: Tensor
    """int64, pinned, room for the widest outcome."""
    arrived: torch.cuda.Event


class CapturedSteps(Steps):
    """Steps that are captured in CUDA graphs and replayed; parameters as of `Steps`, and a stream of `_streams`.

    Between entering and leaving that stream is the current one; it is given back then.
    """

    def __init__(
        self, state: DecodingState, runner: Runner, drafter: Drafter, ends: Tensor | None, stream: torch.cuda.Stream
    ) -> None:
        super().__init__(state, runner, drafter, ends)
        batch, longest_draft = state.batch_size, state.capacity - state.max_length - 1
        self._stream = stream
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: dict[tuple[Any, ...], _Graph] = {}
        self._runs: Counter[tuple[Any, ...]] = Counter()
        self._captures = True
        self._limits = torch.empty_like(state.lengths)
        self._drafts: dict[int, Draft] = {}  # by width: where drafts made on the host stand for the graphs
        room = batch * ((longest_draft + 1) * numbers_of_token(state.num_top) + OUTCOME_COLUMNS)
        self._landings = cycle([_Landing(_pinned(room, state.device), torch.cuda.Event()) for _ in range(2)])
        self._cleanup = ExitStack()
        _hear_warnings()  # well before a step is checked, so that others who restore the hook restore this one

    def __enter__(self) -> CapturedSteps:
        try:
            self._stream.wait_stream(torch.cuda.current_stream(self.state.device))
            self._cleanup.enter_context(torch.cuda.stream(self._stream))
        except BaseException:
            _streams.give_back(self.state.device, self._stream)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._cleanup.close()
            self._stream.synchronize()  # a step may be under way, and all that it works on is about to be freed
        finally:
            self._under_way.clear()
            self._graphs.clear()
            _streams.give_back(self.state.device, self._stream)

    def _lag(self, schedule: Schedule) -> int:
        return int(self.drafter.capturable and not schedule.learns)

    def _launch(self, wanted: int, schedule: Schedule) -> Any:
        self.steady = True
        self._limits.fill_(wanted)
        # A graph of the full width serves the last steps too, in which fewer tokens are left than are drafted.
        limits = self.state.draft_limits(wanted)
        outcome = self._run(limits, schedule.round_up(wanted), int(limits.max()), schedule.round_up)

        landing = next(self._landings)
        landing.buffer[: outcome.numel()].copy_(outcome.view(-1), non_blocking=True)
        landing.arrived.record(self._stream)
        return landing, outcome.shape

    def _fetch(self, launched: Any) -> np.ndarray:
        landing, shape = launched
        landing.arrived.synchronize()
        outcome: np.ndarray = landing.buffer[: shape.numel()].view(shape).numpy().copy()  # the buffer is reused
        return outcome

    def _run(self, host_limits: np.ndarray, width: int, num_tokens: int, round_up: Callable[[int], int]) -> Tensor:
        """Enqueue a step of `width` draft tokens (of which a drafter on the host is asked for `num_tokens`)."""
        state, drafter = self.state, self.drafter
        nodes = drafter.num_nodes - 1 if width and isinstance(drafter, TreeDrafter) else width  # beside the root
        rows = self._rows(nodes)
        at_step = state.at_step(host_limits, rows - nodes)  # so long that attention sees `rows` rows, no more
        if state.asks_drafter(width if drafter.capturable else num_tokens):
            drafter.prepare(at_step)
        if drafter.capturable:
            return self._replay(
                (width, rows),
                lambda: self._verify(self._propose(at_step, width, round_up), at_step.longest),
            )

        draft = self._propose(at_step, num_tokens, round_up)
        if any(part is not None for part in (draft.logits, draft.probs, draft.token_map, draft.tree)):
            what = "a tree" if draft.tree is not None else "a distribution with its draft"
            _explain(f"{type(drafter).__name__} gives {what} and does not say that it can be captured")
            return self._verify(draft, at_step.longest)
        if draft.num_draft_tokens is not None:
            torch.minimum(self._limits, draft.num_draft_tokens, out=self._limits)
        width = draft.tokens.shape[1]
        rows = self._rows(width)
        if width not in self._drafts:
            self._drafts[width] = Draft(torch.empty_like(draft.tokens, memory_format=torch.contiguous_format))
        fixed = self._drafts[width]
        fixed.tokens.copy_(draft.tokens, non_blocking=True)
        return self._replay((width, rows), lambda: self._verify(fixed, rows - width))

    def _verify(self, draft: Draft, longest: int) -> Tensor:
        return verify_step(self.state, self.runner, draft, longest, self._limits, self.ends)

    def _rows(self, drafted: int) -> int:
        """Rows of the cache that attention sees in a step with so many draft tokens that is launched now."""
        state = self.state
        longest_step = state.capacity - state.max_length
        longest = min(int(state.host_lengths.max()) + len(self._under_way) * longest_step, state.max_length)
        rows = MIN_ROWS
        while rows < longest + drafted:
            rows *= 2
        return min(rows, state.capacity)

    def _replay(self, shape: tuple[Any, ...], step: Callable[[], Tensor]) -> Tensor:
        """Replay `step`; in the first runs of its shape run it, then capture it."""
        found = self._graphs.get(shape)
        self.steady = found is not None or not self._captures
        if self.state.unread_from is not None:  # a step with the prompts has rows of its own
            return step()
        if found is None and self._captures:
            self._runs[shape] += 1
            if self._runs[shape] == WARM_UP_STEPS:
                return self._checked(step)
            if self._runs[shape] > WARM_UP_STEPS:
                found = self._capture(shape, step)
        if found is None:
            return step()
        found.graph.replay()
        return found.outcome

    def _checked(self, step: Callable[[], Tensor]) -> Tensor:
        """Run `step`, and find out whether it waits for the device anywhere."""
        with _capturing, _noting_waits() as waits:
            outcome = step()
        if waits:
            self._give_up(waits[0])
        return outcome

    def _capture(self, shape: tuple[Any, ...], step: Callable[[], Tensor]) -> _Graph | None:
        """Capture `step`, which does not run it."""
        graph = torch.cuda.CUDAGraph()
        try:
            # Torch waits for the device before it begins a capture. Other threads may go on using the GPU: only calls
            # of this thread can spoil the capture.
            with (
                _capturing,
                _sync_debug_mode("default"),
                torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"),
            ):
                outcome = step()
        except RuntimeError as error:
            at = traceback.extract_tb(error.__traceback__)[-1]
            what = (str(error) or type(error).__name__).splitlines()[0]
            self._give_up(f"{what} ({at.filename}:{at.lineno})")
            return None
        self._graphs[shape] = _Graph(graph, outcome)
        return self._graphs[shape]

    def _give_up(self, why: str) -> None:
        self._captures = False
        _explain(f"{self.runner.name}: {why}")


_checked: tuple[int, list[str]] | None = None
"""The thread that runs a step under `_noting_waits`, and where it has waited."""


@contextmanager
def _noting_waits() -> Iterator[list[str]]:
    """Where this thread makes the host wait for the device, within. Torch warns in all threads; the others may wait."""
    global _checked
    waits = list[str]()
    _hear_warnings()
    _checked = threading.get_ident(), waits
    try:
        with _sync_debug_mode("warn"):
            yield waits
    finally:
        _checked = None


def _hear_warnings() -> None:
    """Install hook and filter for good: Python has one of each, and other threads may restore theirs meanwhile."""
    if not hasattr(warnings.showwarning, "notes_waits"):
        warnings.showwarning = _noting(warnings.showwarning)
    warnings.filterwarnings("always", message=f".*{_WAITS}")


def _noting(show: Callable[..., None]) -> Callable[..., None]:
    """A ``warnings.showwarning`` that notes waits for the device while a step is checked, and shows all else."""

    def note(message: Any, category: Any, filename: str, lineno: int, *rest: Any, **named: Any) -> None:
        text, checked = str(message).partition("\n")[0], _checked
        if checked is None or _WAITS not in text:
            show(message, category, filename, lineno, *rest, **named)
        elif checked[0] == threading.get_ident():
            checked[1].append(f"{text.partition(' (Triggered')[0]} ({filename}:{lineno})")

    note.notes_waits = True  # type: ignore[attr-defined]
    return note


@contextmanager
def _sync_debug_mode(mode: str) -> Iterator[None]:
    """Torch's mode for where the host would wait for the device: one for all threads."""
    before = torch.cuda.get_sync_debug_mode()
    _set_sync_debug_mode(mode)
    try:
        yield
    finally:
        _set_sync_debug_mode(before)


def _set_sync_debug_mode(mode: str | int) -> None:
    with warnings.catch_warnings():  # torch warns, once a process, that this is a prototype
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode(mode)


def _pinned(size: int, device: torch.device) -> Tensor:
    return torch.empty(size, dtype=torch.int64, device="cpu", pin_memory=_is_cuda(device))
