"""What a measuring process has done, one JSON object per line: what survives when it crashes or hangs.

Lines: ``{"begin": {"case", "provider", "what"}, "limit_s"}``, ``{"end": true}``, ``{"rows": […]}``,
``{"failed": {"case", "provider", "what", "error"}}``, ``{"finished": [phase, case]}``, ``{"facts": {…}}``; each with
its ``"time"`` in seconds since the epoch.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class Journal:
    """Appends to a file; several processes may write one after the other."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, **entry: Any) -> None:
        """Append one entry, on a line of its own: the last writer may have been killed in the middle of a line."""
        with self.path.open("a") as file:
            file.write("\n" + json.dumps({**entry, "time": round(time.time(), 2)}))

    @contextmanager
    def step(self, case: str, provider: str | None, what: str, limit_s: float) -> Iterator[None]:
        """Record a step that may crash, or hang for longer than `limit_s`."""
        self.write(begin={"case": case, "provider": provider, "what": what}, limit_s=limit_s)
        yield
        self.write(end=True)

    def failed(self, case: str, provider: str | None, what: str, error: str) -> None:
        """Note what did not work; it is not tried again."""
        self.write(failed={"case": case, "provider": provider, "what": what, "error": error})

    def entries(self) -> list[dict[str, Any]]:
        """Every complete line; a process that was killed may have left half of one."""
        if not self.path.exists():
            return []
        found = []
        for line in self.path.read_text().splitlines():
            try:
                found.append(json.loads(line))
            except json.JSONDecodeError:
                continue
        return found

    def all(self, key: str) -> list[Any]:
        """The values of every line of one kind."""
        return [entry[key] for entry in self.entries() if key in entry]


def unfinished(entries: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The step that was begun but not ended: what a dead process died of."""
    step = None
    for entry in entries:
        if "begin" in entry:
            step = entry
        elif "end" in entry:
            step = None
    return step
