"""Named operations: collectives that ranks may submit in any order, matched by name.

Read ``api`` first (public functions), then ``operations`` (submit and wait), ``named_lane`` and
``coordinator`` (communication side). ``forms`` makes the public functions from one table.
"""
