"""What programs call: collectives on arrays and gradient reduction for arrays.

``array_collectives`` are synchronous and compare their arguments between ranks first; ``reducer``
is for any training loop that knows when a gradient exists.
"""
