"""The backends that are present, and processes with another environment: shared by several test files."""

from __future__ import annotations

import importlib.util
import io
import itertools
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import specdec_kernels as sk
from python_tests import emulated, interpreted
from specdec_kernels import config
from specdec_kernels.backends import native
from specdec_kernels.testing import exact

CAPABILITIES = config.CPU_CAPABILITIES
ONE_TREE_KERNEL = 'a tree has one CUDA kernel, which walks: "split" is "walk"'


@dataclass(frozen=True)
class Backend:
    """A backend on a device.

    `capability` is the instruction set of the CPU kernels; `strategy` and `schedule` (the seed of a random one) are
    those of the emulated CUDA kernels. Each is None on other backends.
    """

    name: str
    device: str
    capability: str | None = None
    strategy: str | None = None
    schedule: int | None = None

    def __str__(self) -> str:
        schedule = None if self.schedule is None else f"random{self.schedule}"
        device = self.device if self.device != "cpu" else None
        return "-".join(filter(None, (self.name, self.capability, self.strategy, schedule, device)))

    @contextmanager
    def limited(self) -> Iterator[None]:
        """Within: kernels run with this backend's instruction set, or strategy and schedule; Triton's are checked. For
        interpreted kernels each row takes time, for others each call: exact distributions are extracted accordingly.
        """
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(exact, "POINTS", 20 if self.interpreted else 100)
            patch.setattr(exact, "WAYS", 2 if self.interpreted else exact.WAYS)
            with self._limited():
                yield

    @contextmanager
    def _limited(self) -> Iterator[None]:
        if self.strategy is not None:
            with emulated.running(self.strategy, self.schedule):
                yield
        elif self.capability is not None:
            before = native.cpu_capability()
            limit(self.capability)
            try:
                yield
            finally:
                limit(before)
        elif self.interpreted:
            with interpreted.checked():
                yield
        else:
            yield

    @property
    def interpreted(self) -> bool:
        """Whether GPU code is executed on the CPU here, hundreds of times slower than a CPU kernel."""
        return self.strategy is not None or self.by_interpreter

    @property
    def by_interpreter(self) -> bool:
        """Whether Triton's interpreter executes it, by far the slowest."""
        return self.name == "triton" and self.device == "cpu"

    def vocab(self, size: int) -> int:
        """`size`, or if interpreted at most five tiles of 1024 ids, with as many ids in the last tile as `size` has."""
        return size if not self.interpreted or size <= 5 * 1024 else 4 * 1024 + size % 1024

    def cases(self, wanted: int) -> int:
        """How many random cases run: `wanted`. For the emulated CUDA kernels it is that many in one strategy, and a
        tenth in the others and in random schedules (which change no bit, as other tests prove); under Triton's
        interpreter, far slower, a tenth.
        """
        if self.by_interpreter:
            return wanted // 10
        return wanted if self.strategy in (None, "walk") and self.schedule is None else wanted // 10

    def some_cases(self, items: Sequence[Any], most: int | None) -> list[Any]:
        """Which of a test's parametrised items run: all of them; by Triton's interpreter, `interpreted.CASES`; for the
        emulated CUDA kernels `most`, different ones in each strategy, or in each random schedule an eighth of all, at
        random and at least one.
        """
        if self.by_interpreter:
            return interpreted.some_cases(items)
        if self.schedule is not None:
            return random.Random(str(self)).sample(list(items), -(-len(items) // 8))
        return interpreted.some_cases(items, most or emulated.CASES, str(self))

    def batch(self, size: int) -> int:
        """`size`, or if interpreted at most 96 (more than the emulated device runs at once); by Triton 6, as it runs
        one program after the other.
        """
        return min(size, 6 if self.by_interpreter else 96) if self.interpreted else size

    def draws(self, size: int) -> int:
        """How many draws a statistical test makes: `size`; a quarter of it if interpreted; by Triton at most 24."""
        if self.by_interpreter:
            return min(size, 24)
        return size // 4 if self.interpreted else size

    def __getattr__(self, op: str) -> Callable[..., Any]:
        if op.startswith("_") or not hasattr(sk, op):
            raise AttributeError(op)
        return partial(getattr(sk, op), backend=self.name)

    def __call__(self, *values: Any) -> Any:
        """`values` moved to the backend's device."""
        moved = tuple(_to(v, self.device) for v in values)
        return moved[0] if len(moved) == 1 else moved


@contextmanager
def environment(**values: str | None) -> Iterator[None]:
    """Within: as in a process started with these variables, without those that are None."""
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in values.items():
                if value is None:
                    patch.delenv(name, raising=False)
                else:
                    patch.setenv(name, value)
            config.reload()
            yield
    finally:
        config.reload()


def _to(value: Any, device: str) -> Any:
    """Everything that an op takes; what is unknown here would otherwise stay where it is."""
    if isinstance(value, torch.Tensor):
        # a move to the same device keeps strides; so does one to another of an expanded or strided tensor's values
        return value if value.device.type == device else value.to(device)
    if isinstance(value, sk.SamplingParams):
        fields = {f: _to(getattr(value, f), device) for f in ("temperature", "top_k", "top_p", "min_p", "min_p_first")}
        return sk.SamplingParams(**fields)
    if isinstance(value, sk.TokenCounts):
        counts = object.__new__(sk.TokenCounts)
        counts.__dict__.update({name: _to(one, device) for name, one in vars(value).items()})
        return counts
    if isinstance(value, sk.Processors):
        return sk.Processors(**{f: _to(one, device) for f, one in vars(value).items() if not f.startswith("_")})
    if isinstance(value, (sk.TokenMap, sk.DraftTree)):
        return value.to(device)
    if isinstance(value, dict):  # of arguments
        return {name: _to(one, device) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        moved = [_to(one, device) for one in value]
        return type(value)(*moved) if hasattr(value, "_fields") else type(value)(moved)
    if value is None or isinstance(value, (int, float, str, sk.laws.TargetLaw)):
        return value
    raise TypeError(f"Backend: {type(value).__name__} must be something that an op takes, got {value}")


def present(op: str) -> list[Backend]:
    """Every way in which `op` can run here, with the CPU library once for each instruction set of this machine."""
    found = []
    for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        for name, answer in sk.backends(device)[op].items():
            if answer == "yes" and name == "cpu":
                found += [Backend(name, device, c) for c in capabilities()]
            elif answer == "yes" and name != emulated.NAME:
                found.append(Backend(name, device))
    return found


def present_emulated(op: str, schedules: int) -> list[Backend]:
    """The CUDA kernels on the CPU: in index order, and in so many random schedules shared out among the strategies.

    "cluster", "resident" and "early", which differ from "walk" and "split" only in what blocks tell each other, run
    only in random schedules (as in CI); `ops/test_emulated.py` always compares them with the others.
    """
    strategies = emulated.strategies(op)[1:]
    in_order = [s for s in strategies if s in ("split", "walk")]
    at_random = zip(range(1, schedules + 1), itertools.cycle(strategies), strict=False)
    return [
        *(Backend(emulated.NAME, "cpu", strategy=s) for s in in_order),
        *(Backend(emulated.NAME, "cpu", strategy=s, schedule=seed) for seed, s in at_random),
    ]


def capabilities() -> list[str]:
    """The instruction sets to which the CPU library can really be limited here."""
    before = native.cpu_capability()
    found = []
    for capability in CAPABILITIES:
        limit(capability)
        if native.cpu_capability() == capability:
            found.append(capability)
    limit(before)
    return found


def limit(capability: str) -> None:
    native._symbols["CPU"].specdec_limit_cpu_capability(CAPABILITIES.index(capability))


class Terminal(io.StringIO):
    """A stream that a person is looking at."""

    def isatty(self) -> bool:
        return True


def in_fresh_process(code: str, **environment: str) -> str:
    """Run Python `code` in a process with `environment`; its standard output."""
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def example(name: str) -> ModuleType:
    """A program of the folder examples, as a module."""
    path = Path(__file__).resolve().parents[1] / "examples" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
