"""Named operations: collectives that ranks may submit in any order, matched by name.

``forms`` makes the public functions from one table; ``api`` has those without tensors. A call of
``allreduce(x)`` passes through

* ``operands`` here, ``tensor_operands`` in ``torch``: ``submit_form`` has ``make_operation`` make
  it of the tensor
* ``operations``: ``Collectives.submit`` hands it to the communication thread; ``run`` also waits
* ``named_lane``: ``submit`` notes it, ``_negotiate`` sends the names to the coordinator, ``_start``
  executes what all ranks have submitted, in the coordinator's order (``coordinator``)
* ``comm``: ``Backend.all_reduce`` and the other collectives
"""
