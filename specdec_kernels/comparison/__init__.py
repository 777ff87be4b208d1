"""Loops that only serve comparison: cascades without speculation, and the big little decoder. A file for each."""
