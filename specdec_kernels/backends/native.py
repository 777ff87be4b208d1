"""Loads the compiled libraries, which register their kernels with torch's dispatcher, and says what they hold."""

from __future__ import annotations

import ctypes
import logging
import sys
from collections.abc import Iterable
from pathlib import Path

import torch

from ..config import CPU_CAPABILITIES, settings
from . import direct
from .contract import contract

logger = logging.getLogger("specdec_kernels")

_FOLDER = Path(__file__).resolve().parent.parent
_LIBRARIES = {"CPU": "_C_cpu.so", "CUDA": "_C_cuda.so"}
_NO_CODE = (-98, -209)  # errors of CUDA: invalid device function, no kernel image
_OLD_DRIVER = -35  # insufficient driver
_MAY_PASS = (-2, -3, -46)  # out of memory, initialization error, devices unavailable
_problems: dict[str, str] = {}
_symbols: dict[str, ctypes.CDLL] = {}
_registered: dict[str, set[str]] = {}  # ops, by dispatch key


def load(ops: Iterable[str]) -> None:
    """Load what was built, and see which of `ops` it registered; a missing or unloadable library is remembered with
    its reason.

    Raises
    ------
    ImportError
        A compiled part was built from other sources, and might mistake one argument for another.
    """
    try:
        wanted = settings().cpu_capability
    except ValueError:  # an op reports it when it is called, the command earlier
        wanted = None
    for key, name in _LIBRARIES.items():
        path = _FOLDER / name
        if not path.exists():
            _problems[key] = _why_not_there(name)
            continue
        try:
            torch.ops.load_library(str(path))
        except OSError as error:
            _problems[key] = f"{name} does not load: {error.__cause__ or error}"  # torch hides what the loader said
            continue
        _symbols[key] = ctypes.CDLL(str(path))
        _check_same(name, contract(), _number(_symbols[key], "specdec_contract"))
        _registered[key] = {op for op in ops if has_kernel(op, key)}
        if key == "CPU":
            _symbols[key].specdec_limit_cpu_capability(CPU_CAPABILITIES.index(wanted or CPU_CAPABILITIES[-1]))
    try:
        from .. import _host
    except ImportError:  # `host` says why
        pass
    else:
        _check_same("_host", contract(), getattr(_host, "CONTRACT", None))
        for key, library in _symbols.items():  # to which it hands an op's arguments in structs
            layout = _number(library, "specdec_direct_layout")
            _check_same(f"_host or {_LIBRARIES[key]}", getattr(_host, "DIRECT_LAYOUT", None), layout)
    direct.load(ops, _symbols)
    if "CPU" in _problems:
        logger.warning(
            "specdec_kernels runs without its compiled CPU kernels, 10 to 1000 times slower on a CPU: %s",
            _problems["CPU"],
        )


def has_kernel(op: str, key: str) -> bool:
    """Whether the dispatcher has a kernel of `op` for dispatch key `key`."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(f"specdec::{op}", key))


def _why_not_there(name: str) -> str:
    # Python looks in the folder that it was started in, which may be a checkout, before it looks at what is installed.
    folders = [Path(entry, "specdec_kernels").resolve() for entry in sys.path]
    behind = folders[folders.index(_FOLDER) + 1 :] if _FOLDER in folders else []
    hidden = next((folder for folder in behind if folder != _FOLDER and (folder / name).exists()), None)
    if hidden is None:
        return f"{name} was not built (see `specdec env`)"
    return (
        f"{name} is in {hidden}, and the sources in {_FOLDER} hide that package: start Python in another folder, or "
        f"`pip install --no-build-isolation -e {_FOLDER.parent}`"
    )


def _number(library: ctypes.CDLL, name: str) -> int | None:
    function = getattr(library, name, None)
    if function is None:
        return None
    function.restype = ctypes.c_int64
    return int(function())


def _check_same(part: str, expected: int | None, built: int | None) -> None:
    if expected is not None and built != expected:
        raise ImportError(
            f"specdec_kernels: {part} was built from other sources than these: build again "
            "(`make build`, or `pip install --no-build-isolation -e .`)"
        )


def why_missing(op: str, key: str) -> str | None:
    """None if the library for dispatch key `key` (CPU or CUDA) registered `op`, else the reason."""
    if key in _problems:
        return _problems[key]
    if op in _registered[key]:
        return None
    return f"{_LIBRARIES[key]} has no kernel for {op}"


def why_no_code(device: torch.device) -> str | None:
    """None if the CUDA library holds code that GPU `device` runs, else the reason; it may initialise CUDA."""
    if not torch.cuda.is_available():
        return "torch finds no GPU"
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= torch.cuda.device_count():
        return f"torch finds no GPU {index}"
    version = _binary_version(index)
    if version > 0:
        return None
    if version in _NO_CODE:
        major, minor = torch.cuda.get_device_capability(index)
        return f"{_LIBRARIES['CUDA']} was built for {cuda_architectures()}, this GPU is sm_{major}{minor}"
    older = "the driver is too old for its CUDA toolkit, " if version == _OLD_DRIVER else ""
    return f"{_LIBRARIES['CUDA']} does not run on GPU {index}: {older}CUDA error {-version}"


def may_pass(device: torch.device) -> bool:
    """Whether `why_no_code` names an error that need not last, as where a GPU's memory is full."""
    if not torch.cuda.is_available():
        return False
    index = torch.cuda.current_device() if device.index is None else device.index
    return index < torch.cuda.device_count() and _binary_version(index) <= 0 and index not in _versions


_versions: dict[int, int] = {}


def _binary_version(index: int) -> int:
    """The version of the code that a GPU runs, or an error's negative number; kept, unless the error may pass."""
    if index in _versions:
        return _versions[index]
    version = int(_symbols["CUDA"].specdec_cuda_binary_version(index))
    if version not in _MAY_PASS:
        _versions[index] = version
    return version


def cuda_architectures() -> str:
    """What the CUDA library was built for, for example "80;90a;120+PTX"."""
    info = _symbols["CUDA"].specdec_cuda_build_info
    info.restype = ctypes.c_char_p
    return str(info().decode()).split()[0].removeprefix("archs=")


def cpu_capability() -> str:
    """The instruction set the CPU kernels run with: "avx512", "avx2" or "default"."""
    return CPU_CAPABILITIES[_symbols["CPU"].specdec_cpu_capability()]
