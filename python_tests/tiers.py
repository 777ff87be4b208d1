"""What `make test` runs: the short tier. `make test-all` runs both, ``--tier=long`` what the short one leaves out.

Of every test the short tier runs a selection of its parametrised cases, a different one on each backend:

- without a backend, by the CPU kernels with the machine's widest instruction set, and on a GPU: enough for each pair of
  values of two parameters to occur, i.e. all cases of a test with one parameter or two;
- by the other instruction sets, by the reference and by the emulated CUDA kernels: enough for each value of each
  parameter to occur;
- by interpreted Triton, the slowest: one;
- at most as many as the test's mark ``short`` says: of all its ``cases``, of those ``emulated`` or by ``triton``.

By interpreted Triton, in every tier, only cases with the values named in the test's mark ``on_triton`` run.

A test marked ``long`` is left out, and so are the cases of a parameter value marked so.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import combinations
from typing import Any

from python_tests import interpreted
from specdec_kernels.backends import native

TIERS = ("short", "long", "all")
LEAST = 3  # of the cases in which each value occurs
TRITON = 1


def run(items: Sequence[Any], tier: str) -> list[Any]:
    """The cases of one test on one backend that a tier runs."""
    if tier == "all":
        return list(items)
    chosen = set(map(id, short(items)))
    return [item for item in items if (id(item) in chosen) == (tier == "short")]


def marked_for_triton(items: Sequence[Any]) -> list[Any]:
    """Of one test's cases by interpreted Triton, those with the values that the test's mark names."""
    marker = items[0].get_closest_marker("on_triton")
    wanted = {} if marker is None else marker.kwargs
    return [item for item in items if wanted.items() <= item.callspec.params.items()]


def short(items: Sequence[Any]) -> list[Any]:
    """The cases that the short tier runs."""
    items = [item for item in items if item.get_closest_marker("long") is None]
    if len(items) < 2:
        return items
    backend = items[0].callspec.params.get("backend")
    how = kind_of(backend)
    marker = items[0].get_closest_marker("short")
    most = marker and marker.kwargs.get("cases" if how == "narrow" else how)
    if most is None and how == "triton":
        most = TRITON
    if most is not None:
        return random.Random(str(backend)).sample(items, min(most, len(items)))
    return pairwise(items, str(backend)) if how == "cases" else interpreted.some_cases(items, LEAST, str(backend))


def kind_of(backend: Any) -> str:
    """Which of the above rules selects a backend's cases; "cases" for a test without a backend."""
    if getattr(backend, "interpreted", False):
        return "triton" if backend.by_interpreter else "emulated"
    widest = getattr(backend, "capability", None) in (None, native.cpu_capability())
    return "cases" if widest and getattr(backend, "name", None) != "reference" else "narrow"


def pairwise(items: Sequence[Any], seed: str) -> list[Any]:
    """Some of the items, in which every pair of values of two parameters occurs that occurs in all of them."""
    if len(items) < 2:
        return list(items)
    values = {id(item): sorted(interpreted.values_of(item)) for item in items}
    pairs = {key: {*combinations(value, 2), *combinations(value, 1)} for key, value in values.items()}
    left = random.Random(seed).sample(list(items), len(items))
    chosen, seen = [], set[Any]()
    most_new = max(map(len, pairs.values()))
    while most_new:  # items that cover the most new pairs come first
        for item in left:
            if len(pairs[id(item)] - seen) >= most_new:
                chosen.append(item)
                seen |= pairs[id(item)]
        left = [item for item in left if not pairs[id(item)] <= seen]
        most_new = max((len(pairs[id(item)] - seen) for item in left), default=0)
    return chosen
