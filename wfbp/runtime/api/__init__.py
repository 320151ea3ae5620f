"""What programs call: collectives on arrays and gradient reduction for arrays.

``array_collectives`` makes operations of NumPy's arrays, as ``wfbp.torch.collectives`` does of
tensors; ``parameters`` copies those of one rank to all; ``reducer`` is for any training loop that
knows when a gradient exists.
"""
