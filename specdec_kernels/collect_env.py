"""A report on this machine and installation, to paste into a bug report.

``specdec env`` prints it. The file needs the standard library only and runs by itself, so that it also reports an
installation that cannot be imported: ``python path/to/specdec_kernels/collect_env.py``.
"""

from __future__ import annotations

import sys

if __name__ == "__main__" and not __package__:
    sys.path.pop(0)  # run by its path: this folder's types.py would hide the standard library's

import argparse
import contextlib
import ctypes
import importlib.metadata
import json
import os
import platform
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

__all__ = ["collect", "cuda_build_info", "main"]

_FOLDER = Path(__file__).resolve().parent
_PACKAGES = ("torch", "numpy", "triton", "transformers", "tokenizers", "safetensors", "gguf", "pybind11", "setuptools")
_ISA_FLAGS = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16", "amx_tile")
_VARIABLES = ("CC", "CUDA_HOME", "CUDA_VISIBLE_DEVICES", "CXX", "OMP_NUM_THREADS", "OMP_WAIT_POLICY", "VIRTUAL_ENV")
_PROBE_SECONDS = 120.0

_PROBE_TORCH = """
import torch
print(f"imports: torch {torch.__version__}, CUDA {torch.version.cuda}, {torch.get_num_threads()} threads")
for i in range(torch.cuda.device_count()):
    p = torch.cuda.get_device_properties(i)
    print(f"device {i}: {p.name}, sm_{p.major}{p.minor}, {p.total_memory >> 20} MiB")
"""
_PROBE_PACKAGE = """
import specdec_kernels as sk
print(f"imports: specdec_kernels {sk.__version__}")
print(sk.backends())
"""
_PROBE_CUDA_LIBRARY = """
import torch
from specdec_kernels.collect_env import cuda_build_info
print(cuda_build_info())
"""


def cuda_build_info() -> str:
    """What ``_C_cuda.so`` was built for, such as ``archs=80;90a runtime=13000``.

    Raises
    ------
    OSError
        The library was not built, or does not load (it needs torch's libraries: import torch first).
    """
    library = ctypes.CDLL(str(_FOLDER / "_C_cuda.so"))
    library.specdec_cuda_build_info.restype = ctypes.c_char_p
    return library.specdec_cuda_build_info().decode()


def _compiler() -> str:
    try:
        wanted = shlex.split(os.environ.get("CXX") or "")
        found = wanted or [next((name for name in ("c++", "g++", "clang++") if shutil.which(name)), "c++")]
        return _first_line([*found, "--version"])
    except ValueError as error:  # a quotation mark that is not closed
        return f"CXX cannot be read: {error}"


def _nvcc() -> str:
    """The one that setup.py takes."""
    home = os.environ.get("CUDA_HOME")
    named = f"{home}/bin/nvcc" if home else None
    return (named and shutil.which(named)) or shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"


def collect() -> list[tuple[str, str]]:
    """The report as (name, value) pairs; a value may have several lines. What cannot be found out says so."""
    rows = [
        ("specdec_kernels", f"{_version('specdec_kernels')} in {_FOLDER}"),
        ("revision", _revision()),
        ("compiled parts", _compiled_parts()),
        ("Python", f"{platform.python_version()} ({platform.python_implementation()}) at {sys.executable}"),
        ("system", f"{platform.platform()}, glibc {platform.libc_ver()[1] or 'unknown'}"),
        ("CPU", _cpu()),
        ("memory", _memory()),
        ("C++ compiler", _compiler()),
        ("nvcc", _last_line([_nvcc(), "--version"])),
        ("GPU driver", _output(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"])),
        ("packages", ", ".join(f"{name} {_version(name)}" for name in _PACKAGES)),
        ("environment", _variables()),
        ("torch", _python(_PROBE_TORCH)),
        ("package", _python(_PROBE_PACKAGE)),
    ]
    if (_FOLDER / "_C_cuda.so").exists():
        rows.append(("CUDA library", _python(_PROBE_CUDA_LIBRARY)))
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report; 0 always, since a broken installation is what it is for."""
    description = "A report on this machine and installation, to paste into a bug report."
    parser = argparse.ArgumentParser(prog="specdec env", description=description)
    parser.add_argument("--json", action="store_true", help="print the report as one JSON document instead")
    if parser.parse_args(argv).json:
        print(json.dumps(dict(collect()), indent=1))
        return 0
    for name, value in collect():
        first, *rest = value.splitlines() or [""]
        print(f"{name + ':':17}{first}")
        for line in rest:
            print(f"{'':17}{line}")
    return 0


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _run(command: list[str], seconds: float = 20.0) -> tuple[int, str, str]:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, errors="replace")
    except FileNotFoundError:
        return -1, "", "not found"
    except (OSError, subprocess.TimeoutExpired) as error:
        return -1, "", f"failed: {error}"
    return done.returncode, done.stdout.strip(), done.stderr.strip()


def _output(command: list[str]) -> str:
    code, out, err = _run(command)
    return out if code == 0 and out else err or f"failed with exit code {code}"


def _first_line(command: list[str]) -> str:
    return _output(command).splitlines()[0]


def _last_line(command: list[str]) -> str:
    return _output(command).splitlines()[-1]


def _python(code: str) -> str:
    # In a process of its own: an import that fails, hangs or crashes the interpreter is then a line of the report. The
    # package is looked for beside this file first: this installation is the one in question.
    path = f"import sys; sys.path[0] = {str(_FOLDER.parent)!r}\n"
    status, out, err = _run([sys.executable, "-c", path + code], _PROBE_SECONDS)
    if status == 0:
        return out
    reason = err.splitlines()[-1] if err else f"exit code {status}"
    return "\n".join(filter(None, [out, f"FAILED: {reason}"]))


def _revision() -> str:
    if not (_FOLDER.parent / ".git").exists():
        return "not a checkout"
    return _output(["git", "-C", str(_FOLDER.parent), "describe", "--always", "--dirty"])


def _compiled_parts() -> str:
    return ", ".join(sorted(path.name for path in _FOLDER.glob("*.so"))) or "none (Python only)"


def _cpu() -> str:
    fields: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            fields[key.strip()] = value.strip()
    has = set(fields.get("flags", "").split())
    flags = " ".join(flag for flag in _ISA_FLAGS if flag in has)
    name = fields.get("model name") or platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} cores, {flags or 'no AVX'}"


def _memory() -> str:
    try:
        pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return "unknown"
    return f"{pages * size / 2**30:.1f} GiB"


def _variables() -> str:
    names = [*_VARIABLES, *sorted(name for name in os.environ if name.startswith("SPECDEC_"))]
    return ", ".join(f"{name}={os.environ[name]}" for name in names if name in os.environ) or "none set"


if __name__ == "__main__":
    sys.exit(main())
