"""Who owns which state: a drafter, and a `Runner` of the caller's own, hold that of one call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from weakref import WeakValueDictionary


class _Call:
    """Represents a call for as long as its frames exist."""


_lock = Lock()
# Keyed by the ids of objects that a call keeps alive, so none is reused. Weak: Ctrl-C may come between any two lines
# below.
_claimed: WeakValueDictionary[int, _Call] = WeakValueDictionary()


@contextmanager
def claimed(caller: str, **held: object) -> Iterator[None]:
    """Keep the `held` objects (by argument name) from every other call, in any thread, until the exit.

    Raises
    ------
    ValueError
        Another call has one of them.
    """
    call = _Call()
    with _lock:
        for name, value in held.items():
            if id(value) in _claimed:
                raise ValueError(
                    f"{caller}: {name} serves one call at a time, got a {type(value).__name__} that another call is "
                    f"using: give each call one of its own"
                )
        _claimed.update(dict.fromkeys(map(id, held.values()), call))
    try:
        yield
    finally:
        del call  # released at once, even if an exception keeps this frame alive
