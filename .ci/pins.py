"""Print the pins of requirements-test.txt (stdin) that go with the torch that is installed, and that torch itself.

A torch that was there before `make` stays, and may exclude a pin: one for CUDA asks for its own triton, an older one
for an older setuptools. It brought both.
"""

from __future__ import annotations

import importlib.metadata
import sys

from pip._vendor.packaging.requirements import Requirement

required = map(Requirement, importlib.metadata.requires("torch") or [])
allowed = {r.name: r.specifier for r in required if r.marker is None or r.marker.evaluate({"extra": ""})}
print(f"torch=={importlib.metadata.version('torch')}")
for line in sys.stdin.read().splitlines():
    name, _, version = line.partition("==")
    if version and name != "torch" and (name not in allowed or version in allowed[name]):
        print(line)
