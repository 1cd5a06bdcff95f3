"""Experiments and measurements; each module runs with ``python -m benchmarks.NAME`` from the top of the repository."""
