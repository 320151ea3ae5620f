"""The comparisons of ``wfbp bench``; wfbp's own benchmarks are in ``tests/benchmarks``."""
