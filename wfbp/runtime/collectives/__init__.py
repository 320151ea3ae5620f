"""Named operations: collectives that ranks may submit in any order, and wait for later.

Read ``coordinator`` first (what a rank asks for; what all ranks together may do, and in which
order), then ``named_lane`` (does it, on the communication thread), ``operations`` (names, handles
and process sets of one runtime), ``operands`` (makes operations of any framework's tensors) and
``api`` (what programs call). ``forms`` is the table of public functions, ``arithmetic`` what no
backend computes.
"""
