"""Random numbers that interpreted Triton kernels make of seeds are given to them, over several steps as well."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from unittest import mock

import numpy as np
import pytest

from python_tests import interpreted
from specdec_kernels.audit import audit
from specdec_kernels.audit.composed import arrival_chance, won
from specdec_kernels.audit.cut import Bisection
from specdec_kernels.audit.signatures import VllmV2
from specdec_kernels.audit.step import step_of

if reason := interpreted.why_not():
    pytest.skip(reason, allow_module_level=True)

from triton.runtime import interpreter

from python_tests.audit import planted_kernels
from specdec_kernels.audit.cases import chains

STEPS = {"cases": ["cannot be"], "steps": True}
ONE = {"cases": ["cannot be", "two ids, the likelier", "three ids"], "steps": False}


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    with mock.patch.multiple(interpreter, **interpreted.faster(interpreter)):
        yield


@pytest.mark.short(cases=1)
@pytest.mark.parametrize(
    ("defects", "asked", "cause"),
    [
        ({"block": True, "per_step": True}, STEPS, None),
        ({}, {"cases": ["one-hot draft", "greedy target and"], "steps": False}, None),
        ({"shared": True}, STEPS, "shared-noise"),
        ({"block": True}, STEPS, "noise-again"),
        ({"test": "<="}, ONE, "zero-accepted"),
        ({"test": "always"}, ONE, "everything-accepted"),
    ],
    ids=["fresh", "right", "shared", "again", "<=", "always"],
)
def test_kernels_are_audited_exactly(defects: dict[str, object], asked: dict[str, object], cause: str | None) -> None:
    made = planted_kernels.vllm_v2_of(**defects)  # type: ignore[arg-type]
    draft = made.gumbel_sample if asked["steps"] else None
    report = audit(made.rejection_sample, "vllm-v2", draft=draft, **asked)  # type: ignore[arg-type]
    assert [finding.name for finding in report.findings] == ([cause] if cause else []), report
    assert {found.how for found in (*report.rows, *report.loops)} == {"exact"}
    assert len(report.loops) == 2 * bool(asked["steps"])
    assert "2**-" not in str(report)  # what a uniform's chance of being 0 is, is the kernel's matter
    if "test" not in defects:
        assert max(row.distance for row in report.rows) < 2e-6


def test_every_number_of_a_kernel_is_known_by_what_made_it() -> None:
    case = next(case for case in chains() if case.name == "two ids")
    verify = planted_kernels.vllm_v2_of().rejection_sample
    signature, width = VllmV2(verify), case.problem.num_tokens
    cut = Bisection(signature, signature.emit, step_of(case.problem), 2, width, np.random.default_rng(0), position=9)
    cut.find()
    coin, races = planted_kernels.COIN, [planted_kernels.RACE + at * planted_kernels.BLOCK for at in (9, 10)]
    assert set(cut.labels) == {("rand", coin + 9), *(("rand", (race,), (race + 1,)) for race in races)}
    assert sorted(cut.kinds) == ["race", "race", "uniform"]


def test_chances_of_races_that_share_their_numbers() -> None:
    """Two races' winners, over all pairs of them, add up to either one's chances, and to those of exponentials."""
    rng = np.random.default_rng(3)
    one, other = rng.random((2, 3))
    chances = np.array([[arrival_chance(np.maximum(won(one, a), won(other, b))) for b in range(3)] for a in range(3)])
    np.testing.assert_allclose(chances.sum(1), one / one.sum(), rtol=1e-12)
    np.testing.assert_allclose(chances.sum(0), other / other.sum(), rtol=1e-12)
    times = rng.exponential(size=(200_000, 3))
    seen = np.zeros((3, 3))
    np.add.at(seen, ((one / times).argmax(1), (other / times).argmax(1)), 1 / len(times))
    np.testing.assert_allclose(seen, chances, atol=0.005)
    third = rng.random(3)  # three of them, and the same one twice
    triples = [
        arrival_chance(np.maximum.reduce([won(one, a), won(other, b), won(third, c), won(one, a)]))
        for a, b, c in product(range(3), repeat=3)
    ]
    np.testing.assert_allclose(np.reshape(triples, (3, 3, 3)).sum(2), chances, atol=1e-12)
