"""Threads that share out the rows of a CPU op: csrc/emulator/tests/team.cpp. `make sanitize` runs it under TSan."""

from __future__ import annotations

import subprocess

from python_tests.emulator.programs import MARKS, program

pytestmark = MARKS


def test_every_part_of_a_row_is_done_once_by_whoever_is_free() -> None:
    done = subprocess.run([program("team", "plain")], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout
