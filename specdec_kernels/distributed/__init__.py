"""Verification where the vocabulary is sharded over ranks, which exchange a few numbers per row and tile and, for cut
rows, the logits that may be kept.
"""

from __future__ import annotations

from .chain import verify_chain

__all__ = ["verify_chain"]
