"""Benchmarks on a GPU; `bench.gpu_report` runs them with the build, the tests and the sanitizer."""
