"""Drafting and verifying over several steps, with the engine's own random numbers: what a single step cannot show.

If a drafter and a verifier share numbers, or a later step takes them again, each step is still right by itself. The
joint distribution of the first tokens is tested; where it is off, the loop is run again with one thing changed, and
what heals it shows the cause. For interpreted kernels, whose numbers can be given, small loops are exact (composed.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from ..sampling import SamplingParams
from ..testing import Float64, Int64
from ..testing.counts import g_test
from . import composed
from .cases import context_tables
from .extract import LEVEL, MERGED
from .noise import UnknownNoise
from .signatures import Signature
from .step import Step, draw, laws, step_behind

TOKENS = 4
"""How many tokens' joint distribution is tested; with drafts of three, at least two steps."""
_NUM_DRAFT = 3
_MOST_STEPS = 3 * TOKENS
_MOST_GENERATORS = 8000


class Finding(NamedTuple):
    """Something wrong: the cause by a short name, and in words."""

    name: str
    words: str


@dataclass(frozen=True)
class Loop:
    """What a loop emitted.

    Attributes
    ----------
    name : str
    vocab : int
    samples : int or None
        None: exact.
    distance : float
        Total variation of the first tokens' distribution, or of their frequencies.
    p_value : float
        Of a G-test; 1 where exact.
    cause : Finding or None
        What is wrong.
    failure : str or None
        What went wrong instead of an answer.
    tolerance : float
        Total variation that counts as zero.
    """

    name: str
    vocab: int
    samples: int | None
    distance: float
    p_value: float
    cause: Finding | None = None
    failure: str | None = None
    tolerance: float = 1.0

    @property
    def lossless(self) -> bool:
        return self.failure is None and self.p_value > LEVEL and self.distance <= self.tolerance

    @property
    def how(self) -> str:
        return "exact" if self.samples is None else f"{self.samples} samples"


class LoopRunner:
    """A loop of steps around a verifier and its drafter; `seeded`: each request has a generator."""

    def __init__(self, signature: Signature, samples: int, seed: int, seeded: bool = False) -> None:
        self.signature, self.seeded = signature, seeded
        most = samples if signature.batched else 2000
        self.samples = min(samples, _MOST_GENERATORS if self.seeded else most)
        self.rng = np.random.default_rng(seed)
        self._most = self.samples  # sequences at once
        params = SamplingParams()
        self.logits = context_tables()
        self.target, self.draft = (laws(table, params) for table in self.logits)
        self.vocab = len(self.target)

    def run(self, apart: bool = False, fresh: bool = False) -> tuple[Int64, Int64]:
        """``[samples, TOKENS]`` tokens of every sequence, and the first step's drafts.

        `apart`: drafts are drawn by the audit, with numbers of its own. `fresh`: seeds are new at every step.
        """
        rng, batch, k = self.rng, self.samples, _NUM_DRAFT
        out = np.zeros((batch, TOKENS + k + 2), np.int64)
        length, first = np.zeros(batch, np.int64), np.zeros((batch, k), np.int64)
        seeds = self._seeds()
        generators = self._generators(seeds) if self.seeded else None
        for step_number in range(_MOST_STEPS):
            active = length < TOKENS
            if not active.any():
                return out[:, 1 : TOKENS + 1], first
            if fresh:
                seeds = self._seeds()
                generators = None if generators is None else self._generators(seeds)
            last = out[np.arange(batch), length]
            drafted = self._drafts(last, length, seeds, generators, apart)
            if step_number == 0:
                first = drafted
            before = np.concatenate([last[:, None], drafted], 1)
            step = self._step(before, length, seeds, generators)
            step.uniforms = torch.from_numpy(rng.integers(0, 1 << 24, (batch, self.signature.uniforms(k + 1))) / 2**24)
            step.uniforms = step.uniforms.float()
            tokens = self.in_parts(self.signature.emit, step)
            count = (tokens >= 0).sum(1)
            for i in range(tokens.shape[1]):
                here = np.flatnonzero(active & (i < count) & (length + i < TOKENS))
                out[here, length[here] + i + 1] = tokens[here, i]
            length = np.where(active, np.minimum(length + count, TOKENS), length)
        raise composed.Failure("it emits no token")

    def in_parts(self, call: Callable[[Step], torch.Tensor], step: Step) -> Int64:
        """What `call` gives for a step's sequences: for all of them at once, or for as many as it takes."""
        left, found = np.arange(step.batch), list[Int64]()
        while len(left):
            part = left[: self._most]
            try:
                # A copy: a verifier may give the same buffer at every call.
                found.append(np.array(call(step if len(part) == step.batch else step.take(part)).cpu()))
                left = left[len(part) :]
            except Exception:
                if len(part) == 1:
                    raise
                self._most = (len(part) + 1) // 2
        if found[0].ndim == 1:
            return np.concatenate(found)
        width = max(tokens.shape[1] for tokens in found)
        return np.concatenate([np.pad(t, ((0, 0), (0, width - t.shape[1])), constant_values=-1) for t in found])

    def _drafts(
        self, last: Int64, length: Int64, seeds: torch.Tensor, generators: dict[int, torch.Generator] | None,
        apart: bool,
    ) -> Int64:  # fmt: skip
        drafted: list[Int64] = []
        for i in range(_NUM_DRAFT):
            before = drafted[-1] if drafted else last
            if apart or self.signature.draft is None:
                drafted.append(draw(self.draft[before].numpy(), self.rng))
                continue
            step = self._step(before[:, None].repeat(2, 1), length + i, seeds, generators)
            drafted.append(self.in_parts(self.signature.draw, step))
        return np.stack(drafted, 1)

    def _step(
        self, before: Int64, length: Int64, seeds: torch.Tensor, generators: dict[int, torch.Generator] | None
    ) -> Step:
        """The rows after each of the tokens `before`, the last of which has no draft row."""
        step = step_behind(before, self.logits, (self.target, self.draft))
        step.seeds, step.positions, step.generators = seeds, torch.from_numpy(10 + length), generators
        return step

    def _seeds(self) -> torch.Tensor:
        return torch.from_numpy(self.rng.integers(0, 2**62, self.samples))

    def _generators(self, seeds: torch.Tensor) -> dict[int, torch.Generator]:
        return {i: torch.Generator().manual_seed(seed) for i, seed in enumerate(seeds.tolist())}

    def judged(self, tokens: Int64) -> tuple[float, float]:
        """Total variation and p-value of the tokens ``[samples, TOKENS]`` under the target."""
        return _compared(tokens, self.target.numpy())


def _compared(tokens: Int64, law: Float64) -> tuple[float, float]:
    """Total variation and p-value of tokens ``[samples, n]`` after an id 0; `law` is that of `of_texts`."""
    wanted = composed.of_texts(law, tokens.shape[1])
    counts = np.zeros(wanted.shape)
    np.add.at(counts, tuple(tokens.T), 1)
    return float(np.abs(counts / len(tokens) - wanted).sum() / 2), g_test(counts, wanted, MERGED)


_SHARED = Finding(
    "shared-noise",
    "The drafter and the verifier draw with the same random numbers: with drafts drawn independently of the verifier's "
    "numbers the same loop is right.",
)
_AGAIN = Finding(
    "noise-again",
    "Random numbers are used again at a later step, for tokens that are drafted anew after a rejection: with fresh "
    "seeds at every step the same loop is right. (Block verification needs fresh noise at every step: how much it "
    "accepts depends on tokens that are drawn again.)",
)
_CONSTANT = Finding(
    "constant-noise", "Every call draws the same random numbers: it sets its generator back to one seed."
)
_OTHER = (
    "Drafts are not drawn from the distribution that the verifier is told, or the tokens of one not independently "
    "({how})."
)


def loops(signature: Signature, samples: int, seed: int, tolerance: float) -> list[Loop]:
    """Run the loop, small ones where that can be done exactly, and where one is off find out why."""
    if signature.keyed:
        try:
            return [_exactly(signature, *shape, seed, tolerance) for shape in composed.SHAPES]
        except UnknownNoise:
            pass
    ways = (False, True) if signature.name == "vllm-v1" else (False,)
    return [_sampled(LoopRunner(signature, samples, seed, seeded), seed) for seeded in ways]


def _sampled(runner: LoopRunner, seed: int) -> Loop:
    name = _name(TOKENS, _NUM_DRAFT, runner.signature) + ", seeded requests" * runner.seeded
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            tokens, first = runner.run()
            distance, p_value = runner.judged(tokens)
            cause = None if p_value > LEVEL else _cause(runner, first)
    except composed.Failure as error:
        return Loop(name, runner.vocab, runner.samples, 1.0, 0.0, failure=str(error))
    except Exception as error:
        failure = f"it raises {type(error).__name__}: {(str(error).splitlines() or [''])[0][:100]}"
        return Loop(name, runner.vocab, runner.samples, 1.0, 0.0, failure=failure)
    return Loop(name, runner.vocab, runner.samples, distance, p_value, cause)


def _name(tokens: int, num_draft: int, signature: Signature) -> str:
    return f"{tokens} tokens, drafts of {num_draft}" + (", its own drafter" if signature.draft else "")


def _exactly(signature: Signature, vocab: int, num_draft: int, seed: int, tolerance: float) -> Loop:
    """A loop of few tokens, if its random numbers can be given."""
    name = _name(composed.TOKENS, num_draft, signature)
    try:
        found = composed.Composed(signature, vocab, num_draft, seed)
    except composed.Failure as error:
        return Loop(name, vocab, None, 1.0, 1.0, failure=str(error))
    distance, cause = found.distance(), None
    if distance > tolerance:
        if found.draft_distance() > tolerance:
            cause = Finding("other-draft", _OTHER.format(how=f"total variation {found.draft_distance():.1e}"))
        elif found.distance(fresh=True) <= tolerance:
            cause = _AGAIN
        elif found.distance(apart=True) <= tolerance:
            cause = _SHARED
    return Loop(name, vocab, None, distance, 1.0, cause, tolerance=tolerance)


def _cause(runner: LoopRunner, first: Int64) -> Finding | None:
    def right(run: Callable[[], tuple[Int64, Int64]]) -> bool:
        return runner.judged(run()[0])[1] > LEVEL

    if runner.signature.draft is not None:
        _, p_value = _compared(first, runner.draft.numpy())
        if p_value <= LEVEL:
            return Finding("other-draft", _OTHER.format(how=f"p = {p_value:.1e} of a G-test of the first step's"))
    if (runner.signature.keyed or runner.signature.draft is not None) and right(lambda: runner.run(fresh=True)):
        return _AGAIN
    if runner.signature.draft is not None and right(lambda: runner.run(apart=True)):
        return _SHARED
    return _CONSTANT if _constant(runner) else None


def _constant(runner: LoopRunner) -> bool:
    """Whether a call on the same step emits the same, whatever the state of torch's generator."""
    if runner.signature.keyed or runner.signature.uniforms(_NUM_DRAFT + 1) > 1:
        return False
    batch = runner.samples
    before = runner.rng.integers(0, runner.vocab, (batch, _NUM_DRAFT + 1))
    step = runner._step(before, np.zeros(batch, np.int64), runner._seeds(), None)
    step.uniforms = torch.full((batch, runner.signature.uniforms(_NUM_DRAFT + 1)), 0.5)
    emitted = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        emitted.append(runner.in_parts(runner.signature.emit, step))
    return np.array_equal(emitted[0], emitted[1])
