"""Named operations: collectives that ranks may submit in any order, and wait for later.

Read ``coordinator`` first: requests of ranks, and the order of what all ranks have requested. Then
``named_lane`` carries them out on the communication thread. ``operations`` holds the names, handles
and process sets of one runtime, ``operands`` makes operations of any framework's tensors, ``api``
has the public functions without tensors. ``forms`` is the table of those with tensors, and
``arithmetic`` computes what no backend does.
"""
