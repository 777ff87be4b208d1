"""Verification where the vocabulary is sharded over ranks, which exchange numbers of rows and tiles, never logits."""

from __future__ import annotations

from .chain import verify_chain

__all__ = ["verify_chain"]
