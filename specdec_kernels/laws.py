"""Target laws other than the target's own, which trade quality for speed.

Lossless verification is ``target_law=None``. The laws named in the public contract are not available in this release;
`verify_chain` and `generate` refuse anything but None by name.
"""

from __future__ import annotations


def require_lossless(op: str, target_law: object) -> None:
    """Refuse a target law that no kernel implements yet."""
    if target_law is not None:
        raise NotImplementedError(f"{op}: target_law={target_law!r} is not supported yet; only None (lossless) is")
