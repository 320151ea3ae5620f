"""What users compare on their own cluster: ``wfbp bench training`` and ``wfbp bench comm``.

``training`` times whole iterations of wfbp, PyTorch DDP and plain MPI in turns; ``comm`` times
all-reduces of wfbp's backend beside the MPI library's own. The benchmarks with which wfbp itself is
judged are no part of the package: ``tests/benchmarks`` of its sources.
"""
