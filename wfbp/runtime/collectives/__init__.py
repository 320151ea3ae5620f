"""The functions for named operations, which ``runtime.named`` executes.

``forms`` makes the public functions from one table; ``api`` has those without tensors. A call of
``allreduce(x)`` passes through ``operands`` here, ``tensor_operands`` in ``torch``: ``submit_form``
has ``make_operation`` make it of the tensor. ``runtime.named`` describes the rest of the way.
"""
