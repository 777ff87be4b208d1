"""Put peers beside the checkout: ``python -m bench.peers`` (``make gpu-peers``), on a machine with a package registry.

A machine with a GPU may have no registry. This takes the wheels of FlashInfer and vLLM, and of what FlashInfer's own
compilation needs, through pip, and keeps what their verify step needs: some 20 MB in ``peers``, which git ignores. Copy
the folder with the checkout. `bench.providers.beside` imports from it.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from .providers.beside import FOLDER

MOST_BYTES = 50 * 10**6
PLATFORMS = ("manylinux_2_31", "manylinux_2_28", "manylinux_2_27", "manylinux_2_24", "manylinux_2_17", "manylinux2014")
KEPT: Mapping[str, Sequence[str]] = {
    "flashinfer-python": (
        "flashinfer/*.py", "flashinfer/jit/**.py", "flashinfer/trace/**.py", "flashinfer/data/include/flashinfer/*",
        *(f"flashinfer/data/csrc/{name}" for name in
          ("sampling.cu", "renorm.cu", "flashinfer_sampling_binding.cu", "sampling_utils.h", "tvm_ffi_utils.h")),
        "*.dist-info/METADATA",
    ),
    "vllm": (
        "vllm/envs.py", "vllm/logger.py", "vllm/utils/*.py", "vllm/model_executor/warmup/*.py", "vllm/v1/outputs.py",
        "vllm/v1/sample/**.py", "vllm/v1/spec_decode/*.py", "vllm/v1/watermarking/**.py",
        "vllm/v1/worker/gpu/sample/*.py", "vllm/v1/worker/gpu/spec_decode/*.py", "*.dist-info/METADATA",
    ),
    "apache-tvm-ffi": (
        "tvm_ffi/*", "tvm_ffi/include/**", "tvm_ffi/lib/*", "tvm_ffi/dataclasses/*", "tvm_ffi/cpp/**",
        "tvm_ffi/utils/*", "*.dist-info/METADATA",
    ),
    "ninja": ("*.data/scripts/ninja", "*.dist-info/METADATA"),
    "nvidia-curand<11": ("nvidia/*/include/*.h",),
}  # fmt: skip
"""Of each package, the files that are kept: ``*`` within a folder, ``**`` through all below."""
TRITON = """import triton
import triton.language as tl
import triton.language.extra.libdevice as tldevice

HAS_TRITON = True
"""
PLATFORM = """import torch


class _Cuda:
    device_type = "cuda"

    def num_compute_units(self, device_id=0):
        return torch.cuda.get_device_properties(device_id).multi_processor_count

    def __getattr__(self, name):
        return lambda *arguments, **options: name in ("is_cuda", "is_cuda_alike")


current_platform = _Cuda()
CpuArchEnum = Platform = PlatformEnum = object
"""
WRITTEN = {
    "vllm/__init__.py": "", "vllm/triton_utils/__init__.py": TRITON, "vllm/platforms/__init__.py": PLATFORM,
    "flashinfer/__init__.py": "",
}  # fmt: skip
"""In the place of modules that would load all of a package, or ask the machine too much."""


def moved(name: str) -> str:
    """Where a file of a wheel goes: headers that FlashInfer includes go with its own, ninja into ``bin``."""
    if name.startswith("nvidia/"):
        return f"flashinfer/data/include/{name.rpartition('/')[2]}"
    return "bin/ninja" if name.endswith("/ninja") else name


def kept(name: str, patterns: Sequence[str]) -> bool:
    """Whether a file of a wheel matches one of `patterns`."""
    parts = (re.escape(p).replace(r"\*\*", ".*").replace(r"\*", "[^/]*") for p in patterns)
    return any(re.fullmatch(part, name) for part in parts) and not name.endswith("/")


def unpack(wheel: Path, patterns: Sequence[str], folder: Path) -> None:
    """Extract the files of `wheel` that are kept."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if not kept(name, patterns):
                continue
            path = folder / moved(name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(archive.read(name))
            if path.name == "ninja":
                path.chmod(path.stat().st_mode | stat.S_IXUSR)


def download(package: str, python: str, folder: Path) -> Path:
    """The wheel of `package` for that Python on x86-64 Linux, by pip."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "download",
        "-q",
        "--no-deps",
        "-d",
        str(folder),
    ]
    command += ["--only-binary", ":all:", "--python-version", python]
    command += [word for name in PLATFORMS for word in ("--platform", f"{name}_x86_64")]
    subprocess.run([*command, package], check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def lay(folder: Path, wheels: Mapping[str, Path]) -> int:
    """Fill `folder` from wheels by package; returns its bytes."""
    for package, wheel in wheels.items():
        unpack(wheel, KEPT[package], folder)
    for name, text in WRITTEN.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "peers.json").write_text(json.dumps({p: w.name for p, w in wheels.items()}, indent=1) + "\n")
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def main(arguments: Sequence[str] | None = None) -> int:
    parse = argparse.ArgumentParser(prog="python -m bench.peers", description=__doc__)
    parse.add_argument("--python", default="3.12", help="of the machine with the GPU; default: 3.12")
    parse.add_argument("--folder", type=Path, default=FOLDER)
    options = parse.parse_args(arguments)
    there = options.folder.is_dir() and any(options.folder.iterdir())
    if there and not (options.folder / "peers.json").exists():
        parse.error(
            f"--folder must be new or hold what was fetched before, got {options.folder}, which holds something else"
        )
    with tempfile.TemporaryDirectory() as scratch:
        wheels = {}
        for number, package in enumerate(KEPT):
            print("taking", package, flush=True)
            try:
                wheels[package] = download(package, options.python, Path(scratch) / str(number))
            except subprocess.CalledProcessError:  # pip has said why
                print(f"{package} cannot be had; {options.folder} is as it was", file=sys.stderr)
                return 2
        shutil.rmtree(options.folder, ignore_errors=True)
        size = lay(options.folder, wheels)
    print(f"{options.folder}: {size / 1e6:.0f} MB of", ", ".join(wheel.name for wheel in wheels.values()))
    if size > MOST_BYTES:
        print(f"that is more than {MOST_BYTES / 1e6:.0f} MB", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
