"""What the scans' machine code must keep to: needs nvcc (CUDA's) or triton, and cuobjdump; no GPU."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from bench.gpu import sass

MOST_OF_TRITON = {  # "maxima" in float32 are those of probabilities, with their sums
    "maxima, 4 loads": 280, "maxima, 8 loads": 690, "mass, 4 loads": 630, "mass, 8 loads": 520,
    "mass and raw moments, 4 loads": 830, "mass and raw moments, 8 loads": 840,
}  # fmt: skip
CODE = "S2R R0; @P0 BRA 0x70; LDG.E.128 R4; BRA.DIV UR4, 0x80; MUFU.EX2 R1, R2; @!P1 BRA 0x20; EXIT; RET; NOP; BRA 0x40"


def test_counts_the_shortest_way() -> None:
    lines = [f"        /*{16 * i:04x}*/ {text} ;" for i, text in enumerate(CODE.split("; "))]
    code = [(int(address, 16), text) for address, text in sass.INSTRUCTION.findall("\n".join(lines))]
    kernel = sass.Kernel("k", 8, 160, sass.blocks_of(code))
    assert kernel.before_first_load() == 2
    assert kernel.of_a_tile(1, 1) == 4  # 0x20 ... 0x50: the warp's lanes stay together
    assert kernel.of_a_tile(1, 0) is None and kernel.of_a_tile(2, 1) is None
    assert kernel.of_a_program(1, 1) == 7 and kernel.of_a_program(0, 0) == 3  # and to EXIT, to RET
    assert kernel.of_a_program(1, 0) is None


@pytest.fixture(scope="module")
def scans(tmp_path_factory: pytest.TempPathFactory) -> list[sass.Kernel]:
    if sass.find_nvcc() is None or sass.find_cuobjdump() is None:
        pytest.skip("needs nvcc and cuobjdump")
    return sass.cuda_scans(tmp_path_factory.mktemp("sass"))


@pytest.mark.long
@pytest.mark.parametrize("dtype", [0, 1, 2], ids=["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("wanted", [0, 1], ids=["maxima", "mass"])
def test_a_scan_keeps_to_its_instructions(scans: list[sass.Kernel], dtype: int, wanted: int) -> None:
    kernels = [k for k in scans if f"DTypeE{dtype}E" in k.name and f"WantedE{wanted}E" in k.name]
    assert len(kernels) == 4  # of chains, with early exits too, of single rows, and of rows that an index names
    for kernel in kernels:
        tile = kernel.of_a_tile(4 if dtype else 8, 32 if wanted else 0)
        assert tile is not None and tile <= (220 if wanted else 70), (kernel.name, tile)
        assert kernel.registers <= 48, kernel
        looks = any(rows in kernel.name for rows in ("IndexedScan", "EarlyScan"))  # at a number in memory before
        most = 60 if looks else 40 + (dtype == 0)  # float32: 41 are reached
        assert kernel.before_first_load() <= most, kernel.name
        assert kernel.size < 100_000


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_a_scan_of_triton_keeps_to_its_instructions(tmp_path: Path) -> None:
    if sass.find_cuobjdump() is None:
        pytest.skip("needs cuobjdump")
    found: dict[str, list[int]] = {}
    kernels = sass.triton_scans(tmp_path)
    for kernel in kernels:
        for what, count in sass.tile_of(kernel).items():
            found.setdefault(what, []).append(count)
    assert {what: max(counts) for what, counts in found.items() if max(counts) > MOST_OF_TRITON[what]} == {}
    assert set(found) == set(MOST_OF_TRITON)
    # no op's rows are loaded element by element, but the few that are as narrow as a test's
    assert sum(kernel.before_first_load() is None for kernel in kernels) <= 4
