"""What every Triton function takes stays small enough to read: bundles, not long lists."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "specdec_kernels" / "backends" / "triton"
MOST = 12


def functions() -> Iterator[tuple[str, ast.FunctionDef]]:
    """Every function under ``@triton.jit``, kernel or not."""
    for path in sorted(FOLDER.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and any("triton.jit" in ast.unparse(d) for d in node.decorator_list):
                yield f"{path.stem}.{node.name}", node


@pytest.mark.parametrize(("name", "function"), [pytest.param(*found, id=found[0]) for found in functions()])
def test_parameters_are_few_and_stand_one_a_line(name: str, function: ast.FunctionDef) -> None:
    """Or all on the line of the `def`."""
    parameters = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    assert len(parameters) <= MOST and function.args.vararg is None and function.args.kwarg is None
    lines = {parameter.lineno for parameter in parameters}
    assert lines <= {function.lineno} or len(lines) == len(parameters)


def test_all_functions_are_seen() -> None:
    names = {name for name, _ in functions()}
    assert {"law.scan", "finish.finish", "row.load_logits"} <= names and len(names) > 60
