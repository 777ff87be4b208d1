"""Registers, shared memory, stack and spills of every CUDA kernel on every architecture, from what ptxas said.

``python .ci/resources.py FOLDER`` reads the logs that ``setup.py build_kernels`` leaves in FOLDER, prints a table and
fails where a kernel spills registers or keeps an array in local memory ("stack") beyond what `STACK` grants.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench.gpu.names import shortened

STACK: dict[str, int] = {}  # kernel: bytes of local memory that are meant to be there
MOST_SHARED = 99 << 10  # bytes that most GPUs give a block
DYNAMIC = dict.fromkeys(("verify_walk_kernel", "verify_tree_kernel"), 4 * (4096 + (13 << 10)))
"""Bytes of shared memory that a kernel is launched with at most, beside its own: the list and the numbers of
csrc/cuda/walk.cuh (`kMaxListed`, `kMostSharedNumbers`)."""

ENTRY = re.compile(r"Compiling entry function '(?P<name>\w+)' for '(?P<arch>\w+)'")
FUNCTION = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")


class Usage(NamedTuple):
    """Of one kernel on one architecture: registers a thread; bytes of static shared memory, of stack, and spilled."""

    registers: int
    shared: int
    stack: int
    spilled: int

    def __str__(self) -> str:
        return "/".join(map(str, self))


def parse(text: str) -> dict[tuple[str, str], Usage]:
    """``{(mangled name, architecture): usage}`` of one log of ``ptxas -v``."""
    found = {}
    _, *entries = ENTRY.split(text)
    for name, arch, said in zip(entries[::3], entries[1::3], entries[2::3], strict=True):
        functions = FUNCTION.findall(said)  # the kernel's own and those of functions that it calls
        registers, shared = re.search(r"Used (\d+) registers", said), re.search(r"(\d+) bytes smem", said)
        assert registers and functions, f"ptxas words its log in a way not known here: {said}"
        stack, spilled = (sum(int(f[i]) for f in functions for i in which) for which in ((0,), (1, 2)))
        found[name, arch] = Usage(int(registers[1]), int(shared[1]) if shared else 0, stack, spilled)
    return found


def plain(names: list[str]) -> dict[str, str]:
    """Readable names."""
    filt = shutil.which("c++filt")
    out = (
        subprocess.run([filt, *names], capture_output=True, text=True).stdout.splitlines() if filt and names else names
    )
    return {name: shortened(text) for name, text in zip(names, out, strict=True)}


def faults(name: str, arch: str, usage: Usage) -> list[str]:
    """What is wrong with a kernel, in sentences."""
    out = []
    if usage.spilled:
        out.append(f"{name} spills {usage.spilled} bytes on {arch}")
    if usage.stack > STACK.get(name, 0):
        out.append(f"{name} keeps {usage.stack} bytes in local memory on {arch}, {STACK.get(name, 0)} are granted")
    shared = usage.shared + max((most for kernel, most in DYNAMIC.items() if kernel in name), default=0)
    if shared > MOST_SHARED:
        out.append(f"{name} may be launched with {shared} bytes of shared memory on {arch}, a block has {MOST_SHARED}")
    return out


def main(folder: Path) -> int:
    usage: dict[tuple[str, str], Usage] = {}
    for log in sorted(folder.glob("*.log")):
        usage.update(parse(log.read_text()))
    if not usage:
        print(f"{folder} holds no log of ptxas: run `make resources`", file=sys.stderr)
        return 1
    names = plain(sorted({name for name, _ in usage}))
    archs = sorted({arch for _, arch in usage}, key=lambda a: int(re.sub(r"\D", "", a)))
    width = max(map(len, names.values()))
    print("registers a thread / bytes of static shared memory / of stack / spilled")
    print(f"{'kernel':{width}}" + "".join(f"{arch:>18}" for arch in archs))
    wrong: list[str] = []
    for name, text in sorted(names.items(), key=lambda item: item[1]):
        cells = [str(usage.get((name, arch), "-")) for arch in archs]
        print(f"{text:{width}}" + "".join(f"{cell:>18}" for cell in cells))
        wrong += [f for arch in archs if (name, arch) in usage for f in faults(text, arch, usage[name, arch])]
    print("\n".join(wrong) or f"no spills in {len(usage)} compiled kernels")
    return 1 if wrong else 0


if __name__ == "__main__":
    if len(sys.argv) != 2:  # the others' kernels would go unseen
        sys.exit(f"usage: {sys.argv[0]} FOLDER, got {len(sys.argv) - 1}: {' '.join(sys.argv[1:])}")
    sys.exit(main(Path(sys.argv[1])))
