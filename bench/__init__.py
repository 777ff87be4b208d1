"""Benchmarks: ``python -m bench.run`` measures the ops with their peers, ``python -m bench.plot`` draws the results."""
