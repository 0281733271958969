"""Benchmarks: run by hand, never by the suite; the figures go to docs/benchmarks.md."""
