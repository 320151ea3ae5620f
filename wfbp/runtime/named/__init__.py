"""Executes named operations: collectives that ranks may submit in any order, matched by name.

* ``operations``: ``Collectives.submit`` hands it to the communication thread; ``run`` also waits
* ``named_lane``: ``submit`` notes it, ``_negotiate`` sends the names to the coordinator, ``_start``
  executes what all ranks have submitted, in the coordinator's order (``coordinator``)
* ``comm``: ``Backend.all_reduce`` and the other collectives
"""
