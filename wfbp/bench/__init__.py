"""The comparisons behind ``wfbp bench``, for a user's own cluster.

wfbp's own benchmarks are no part of the package: see ``tests/benchmarks`` in its sources.
"""
