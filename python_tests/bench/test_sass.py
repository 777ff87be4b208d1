"""What the CUDA scans' machine code must keep to: needs nvcc and cuobjdump. Triton's: triton/test_compile.py."""

from __future__ import annotations

import pytest

from bench.gpu import sass

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
    if sass.find_tool("nvcc") is None or sass.find_tool("cuobjdump") is None:
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
