"""Readable names of kernels; without torch, so that .ci/resources.py does not need it."""

from __future__ import annotations

import re


def shortened(name: str) -> str:
    """A readable name without namespaces, return type and parameters; template arguments stay."""
    name = re.sub(r"\(anonymous namespace\)::|\bspecdec::(?:cuda::)?|^void ", "", name)
    depth = 0
    for i, c in enumerate(name):  # up to the parameters: the first parenthesis outside template arguments
        depth += (c == "<") - (c == ">")
        if c == "(" and depth == 0:
            return name[:i]
    return name
