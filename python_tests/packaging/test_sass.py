"""What the scan kernels' machine code must keep to, counted by .ci/sass.py: needs nvcc and cuobjdump, and no GPU."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / ".ci/sass.py"

pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="an installed package has no .ci")


@pytest.fixture(scope="module")
def sass() -> ModuleType:
    spec = importlib.util.spec_from_file_location("sass", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["sass"] = module
    spec.loader.exec_module(module)
    return module


CODE = "S2R R0; @P0 BRA 0x70; LDG.E.128 R4; BRA.DIV UR4, 0x80; MUFU.EX2 R1, R2; @!P1 BRA 0x20; EXIT; RET; NOP; BRA 0x40"


def test_counts_the_shortest_way(sass: ModuleType) -> None:
    lines = [f"        /*{16 * i:04x}*/ {text} ;" for i, text in enumerate(CODE.split("; "))]
    code = [(int(address, 16), text) for address, text in sass.INSTRUCTION.findall("\n".join(lines))]
    kernel = sass.Kernel("k", 8, 160, sass.blocks_of(code))
    assert kernel.before_first_load() == 2
    assert kernel.of_a_tile(1, 1) == 4  # 0x20 ... 0x50: the warp's lanes stay together
    assert kernel.of_a_tile(1, 0) is None and kernel.of_a_tile(2, 1) is None
    assert kernel.of_a_program(1, 1) == 7 and kernel.of_a_program(0, 0) == 3  # and to EXIT, to RET
    assert kernel.of_a_program(1, 0) is None


@pytest.fixture(scope="module")
def scans(sass: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Any:
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if nvcc is None or sass.find_cuobjdump() is None:
        pytest.skip("needs nvcc and cuobjdump")
    cubin = tmp_path_factory.mktemp("sass") / "scan.cubin"
    flags = ["-std=c++20", "-O3", "--expt-relaxed-constexpr", "-fmad=false", "-arch=sm_90a", "-cubin", "-I", "csrc"]
    subprocess.run([nvcc, *flags, "csrc/cuda/scan.cu", "-o", str(cubin)], cwd=ROOT, check=True, capture_output=True)
    return [kernel for kernel in sass.kernels_of(cubin) if "scan_kernel" in kernel.name]


@pytest.mark.long
@pytest.mark.parametrize("dtype", [0, 1, 2], ids=["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("wanted", [0, 1], ids=["maxima", "mass"])
def test_a_scan_keeps_to_its_instructions(scans: Any, dtype: int, wanted: int) -> None:
    kernels = [k for k in scans if f"DTypeE{dtype}E" in k.name and f"WantedE{wanted}E" in k.name]
    assert len(kernels) == 3  # of chains, of single rows, and of rows that an index names
    for kernel in kernels:
        tile = kernel.of_a_tile(4 if dtype else 8, 32 if wanted else 0)
        assert tile is not None and tile <= (220 if wanted else 70), (kernel.name, tile)
        assert kernel.registers <= 48, kernel
        most = 60 if "IndexedScan" in kernel.name else 40 + (dtype == 0)  # float32: 41 are reached
        assert kernel.before_first_load() <= most, kernel.name  # an index is loaded and looked at before
        assert kernel.size < 100_000
