"""Benchmarks: ``python -m wfbp.bench NAME``."""
