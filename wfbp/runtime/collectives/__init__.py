"""Named operations: collectives that ranks may submit in any order, and wait for later.

Read ``request`` first (what a rank asks for), then ``coordinator`` (what all ranks together may
do, and in which order), ``named_lane`` (does it, on the communication thread) and ``operations``
(names, handles and process sets of one runtime). ``calls`` makes operations of the tensors of any
framework, ``api`` and ``process_sets`` are what programs see of it, ``arithmetic`` is what no
backend computes.
"""
