"""What the machine code of kernels shows without a GPU: ``python -m bench.gpu.sass [OBJECT...]``.

Prints, for every kernel in object files or cubins, the bytes of its code and its registers, and for a scan the warp
instructions before the first load of a row and those per whole tile. Without objects: compiles CUDA's scan
(csrc/cuda/scan.cu) and Triton's for sm_90 and compares their instructions per tile in ``bench/model/instructions.json``
(a minute). Needs cuobjdump: CUDA's, or the one that comes with Triton.
"""

from __future__ import annotations

import argparse
import heapq
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from specdec_kernels.ops.arguments import TILE
from specdec_kernels.options import existing

from .. import machine
from .process import ROOT

FOLDER = ROOT / "bench/model"
INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;", re.MULTILINE)
BRANCH = re.compile(r"(?:^|\s)(BRA|BRA\.\S+|BRX\S*|JMP\S*)\s(?:.*\b0x([0-9a-f]+))?")
END = re.compile(r"^(EXIT|RET|BRA(?!\.DIV)|JMP|BRX)\b")
ROW_LOADS, EXPONENTIAL = ("LDG.E.128", "LD.E.128"), "MUFU.EX2"


class Block(NamedTuple):
    """Instructions that run one after the other, and where they may go on."""

    length: int
    loads: int
    exponentials: int
    before_load: int
    next: tuple[int, ...]


class Kernel(NamedTuple):
    """One kernel's code on one architecture."""

    name: str
    registers: int
    size: int
    blocks: dict[int, Block]

    def before_first_load(self) -> int | None:
        """Instructions on the shortest path to a load of 16 bytes; None if the kernel has none."""
        for length, at, _, _ in self.walk(0, 1, 0):
            if self.blocks[at].loads:
                return length + self.blocks[at].before_load
        return None

    def of_a_tile(self, loads: int, exponentials: int) -> int | None:
        """Instructions in the shortest cycle with so many loads of 16 bytes and so many exponentials."""
        found = []
        for start, block in self.blocks.items():
            if not block.loads:
                continue
            for length, at, seen, exps in self.walk(start, loads, exponentials):
                if length and at == start and (seen, exps) == (loads, exponentials):
                    found.append(length)
                    break
        return min(found, default=None)

    def of_a_program(self, loads: int, exponentials: int) -> int | None:
        """Instructions on the shortest path from beginning to end with so many of each, for code without a loop."""
        for length, at, seen, exps in self.walk(0, loads, exponentials):
            block = self.blocks[at]
            if not block.next and (seen + block.loads, exps + block.exponentials) == (loads, exponentials):
                return length + block.length
        return None

    def walk(self, start: int, loads: int, exponentials: int) -> Iterator[tuple[int, int, int, int]]:
        """Shortest paths from `start`: instructions, the block reached, and what was passed, at most so much of it."""
        queue, done = [(0, start, 0, 0)], set[tuple[int, int, int]]()
        while queue:
            length, at, seen, exps = heapq.heappop(queue)
            if (at, seen, exps) in done:
                continue
            if length:  # so that the start itself can be reached again
                done.add((at, seen, exps))
            yield length, at, seen, exps
            block = self.blocks[at]
            seen, exps = seen + block.loads, exps + block.exponentials
            if seen <= loads and exps <= exponentials:
                for following in block.next:
                    heapq.heappush(queue, (length + block.length, following, seen, exps))


def find_tool(name: str) -> str | None:
    """A program of CUDA: where setup.py looks for nvcc, else Triton's; None without any."""
    home, triton = os.environ.get("CUDA_HOME"), importlib.util.find_spec("triton")
    folders = [*([f"{home}/bin"] if home else []), os.environ.get("PATH", os.defpath), "/usr/local/cuda/bin"]
    if triton and triton.origin:
        folders.append(str(Path(triton.origin).parent / "backends/nvidia/bin"))
    return shutil.which(name, path=os.pathsep.join(folders))


def blocks_of(code: list[tuple[int, str]]) -> dict[int, Block]:
    """Cut a kernel's instructions, (address, text) each, at branches and at their targets."""
    starts, targets = {code[0][0]}, dict[int, int]()
    for (address, text), (following, _) in zip(code, [*code[1:], (-1, "")], strict=True):
        if "BRA.DIV" in text:  # taken by a warp whose lanes have diverged: there is none
            continue
        branch = BRANCH.search(text)
        if branch and branch[2]:
            targets[address] = int(branch[2], 16)
            starts.add(targets[address])
        if branch or END.search(bare(text)):
            starts.add(following)
    out, at = {}, 0
    while at < len(code):
        end = at + 1
        while end < len(code) and code[end][0] not in starts:
            end += 1
        texts = [text for _, text in code[at:end]]
        (last, text), after = code[end - 1], code[end][0] if end < len(code) else None
        going_on: list[int | None] = [] if END.search(bare(text)) and bare(text) == text else [after]
        going_on.append(targets.get(last))
        loads = [i for i, t in enumerate(texts) if any(load in t for load in ROW_LOADS)]
        exponentials = sum(EXPONENTIAL in t for t in texts)
        first = loads[0] if loads else 0
        out[code[at][0]] = Block(
            len(texts), len(loads), exponentials, first, tuple(a for a in going_on if a is not None)
        )
        at = end
    return out


def bare(text: str) -> str:
    """An instruction without its predicate."""
    return re.sub(r"^@!?U?P\w+\s+", "", text)


def kernels_of(path: Path, arch: str | None = None) -> list[Kernel]:
    """The kernels in an object file or cubin, of one architecture if it holds several."""
    tool = find_tool("cuobjdump")
    assert tool, "cuobjdump was not found"
    said = {}
    for what in ("-sass", "-res-usage"):
        command = [tool, what, *(["-arch", arch] if arch else []), str(path)]
        said[what] = subprocess.run(command, capture_output=True, text=True, check=True)
    usage = said["-res-usage"].stdout + said["-res-usage"].stderr
    registers = dict(re.findall(r"Function (\S+?):\s+REG:(\d+)", usage))
    out = []
    for part in said["-sass"].stdout.split("Function : ")[1:]:
        name = part.split(maxsplit=1)[0]
        code = [(int(address, 16), text) for address, text in INSTRUCTION.findall(part)]
        while code and code[-1][1] == "NOP":
            code.pop()
        out.append(Kernel(name, int(registers[name]), code[-1][0] + 16, blocks_of(code)))
    return out


def tile_of(kernel: Kernel) -> dict[str, int]:
    """Instructions per tile of 1024 ids: {"maxima": ..., "mass": ..., "mass and raw moments": ...}. With a loop over
    tiles, one turn of it; without one, as in Triton's scans, which have a warp for each tile that a program reads, the
    whole program.
    """
    for count in (kernel.of_a_tile, kernel.of_a_program):
        found = {
            (what, loads): count(loads, exponentials)
            for what, exponentials in (("maxima", 0), ("mass", TILE // 32), ("mass and raw moments", TILE // 16))
            for loads in (TILE * 2 // 512, TILE * 4 // 512)  # a warp reads 512 bytes at once: half precision, float32
        }
        if any(found.values()):
            break
    return {f"{what}, {loads} loads": n for (what, loads), n in found.items() if n is not None}


def cuda_scans(folder: Path) -> list[Kernel]:
    """CUDA's scan for each dtype, kind of rows and kind of result."""
    nvcc, cubin = find_tool("nvcc"), folder / "scan.cubin"
    assert nvcc, "nvcc was not found"
    flags = ["-std=c++20", "-O3", "--expt-relaxed-constexpr", "-fmad=false", "-arch=sm_90a", "-cubin", "-I", "csrc"]
    subprocess.run([nvcc, *flags, "csrc/cuda/scan.cu", "-o", str(cubin)], cwd=ROOT, check=True, capture_output=True)
    return [kernel for kernel in kernels_of(cubin) if "scan_kernel" in kernel.name]


def triton_scans(folder: Path) -> list[Kernel]:
    """Triton's scan in every form that an op launches without processors, which search lists for every id."""
    command = [sys.executable, "-m", "python_tests.triton.compile_kernels", "90", "--kernel", "law.scan"]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(folder / "cache")
    subprocess.run([*command, "--cubins", str(folder)], cwd=ROOT, env=environment, check=True, capture_output=True)
    return triton_scans_in(folder)


def triton_scans_in(folder: Path) -> list[Kernel]:
    """Those of them among the files that compile_kernels.py left in a folder."""
    return [
        kernel
        for path in sorted(folder.glob("law.scan.90.*.cubin"))
        if ".processed." not in path.name
        for kernel in kernels_of(path)
    ]


def side_by_side() -> list[dict[str, object]]:
    """By what a tile leaves behind and how it is loaded: the fewest and the most instructions, and the most registers,
    among the forms of both backends' scans.
    """
    rows = []
    for backend, scans in (("cuda", cuda_scans), ("triton", triton_scans)):
        found: dict[str, list[tuple[int, int]]] = {}
        with tempfile.TemporaryDirectory() as folder:
            for kernel in scans(Path(folder)):
                for what, count in tile_of(kernel).items():
                    found.setdefault(what, []).append((count, kernel.registers))
        for what, forms in sorted(found.items()):
            counts, registers = zip(*forms, strict=True)
            row = {"backend": backend, "tile": what, "forms": len(forms)}
            rows.append({**row, "least": min(counts), "most": max(counts), "registers": max(registers)})
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    parse = argparse.ArgumentParser(
        prog="python -m bench.gpu.sass", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parse.add_argument("objects", type=existing, nargs="*", help="files with kernels")
    paths = parse.parse_args(arguments).objects
    for path in paths:
        for kernel in kernels_of(path):
            print(f"{kernel.size:8} bytes {kernel.registers:4} registers  {kernel.name}")
            if "scan" in kernel.name:
                print(f"{'':10}first load after {kernel.before_first_load()}; a tile: {tile_of(kernel)}")
    if not paths:
        rows = side_by_side()
        machine.save(FOLDER, "instructions", rows, {"arch": "sm_90", "ids_a_tile": TILE})
        print(*rows, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
