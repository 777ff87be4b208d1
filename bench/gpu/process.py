"""Programs with a time limit, and where NVIDIA's tools are."""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LOGS = ROOT / "build/gpu-report"
ABSENT = 77
"""Exit code of a part whose tool is not here, or refuses this machine."""
UNFINISHED = 75
"""Exit code of a part whose time was over before its work: nothing is known to be wrong."""
INTERRUPT_S = 10.0
"""How long a program may take to say what it has when it is interrupted."""
TOOLS = ("/usr/local/cuda/bin", "/opt/nvidia/nsight-compute/*")


@dataclass(frozen=True)
class Outcome:
    """How a program ended; `code` is None if it ran out of time."""

    code: int | None
    seconds: float
    log: Path

    def text(self) -> str:
        """What it printed."""
        return self.log.read_text(errors="replace")

    def tail(self, lines: int = 25) -> str:
        """The end of what it printed."""
        return "\n".join(self.text().splitlines()[-lines:] if lines else [])


def find(tool: str) -> str | None:
    """The path of one of NVIDIA's tools: on PATH, else where they are usually installed, the newest."""
    folders = [folder for pattern in TOOLS for folder in sorted(glob.glob(pattern), reverse=True)]
    return shutil.which(tool) or shutil.which(tool, path=os.pathsep.join(folders))


def run(command: Sequence[str], seconds: float, log: Path, environment: Mapping[str, str] | None = None) -> Outcome:
    """Run in the checkout's root, output to `log`; when the time is over, end it and the processes it started."""
    log.parent.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    with log.open("w") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **(environment or {})}, preexec_fn=_heed_interrupts,
        )  # fmt: skip
        code: int | None = None
        try:
            code = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            pass
        finally:
            if code is None:
                end(process)
    return Outcome(code, time.monotonic() - start, log)


def _heed_interrupts() -> None:
    """A shell's background programs ignore interrupts, and so would all that they start."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def end(process: subprocess.Popen[bytes]) -> None:
    """Interrupt a program and its children, so that they report what they have; kill those that remain."""
    try:
        os.killpg(process.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=INTERRUPT_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
