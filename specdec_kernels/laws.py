"""Target laws other than the target's own, which trade quality for speed: none in this release.

Lossless verification is ``target_law=None``; `verify_chain`, `verify_packed` and `generate` refuse anything else by
name.
"""

from __future__ import annotations


def require_lossless(op: str, target_law: object) -> None:
    """Refuse a target law that no kernel implements yet."""
    if target_law is not None:
        raise NotImplementedError(f"{op}: target_law={target_law!r} is not supported yet; only None (lossless) is")
