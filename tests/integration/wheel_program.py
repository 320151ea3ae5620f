"""What an installed wheel has to do on two ranks: average in the extension, and by a plan.

Usage: mpirun -n 2 python wheel_program.py
"""

from __future__ import annotations

import numpy as np

import wfbp

wfbp.init()
mean = wfbp.allreduce(np.full(5, wfbp.rank() + 1.0))
assert mean.tolist() == [(wfbp.size() + 1) / 2] * 5, mean
reducer = wfbp.GradientReducer([("w", np.zeros(1000, np.float32)), ("b", np.zeros(3, np.float32))])
for step in range(5):
    reducer.mark_ready(1, np.full(3, step, np.float32))
    reducer.mark_ready(0, np.full(1000, wfbp.rank(), np.float32))
    weights, biases = reducer.wait()
    assert weights.tolist() == [(wfbp.size() - 1) / 2] * 1000
    assert biases.tolist() == [step] * 3
print("rank", wfbp.rank(), "is done")
wfbp.shutdown()
