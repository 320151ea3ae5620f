"""What one rank does together with the others, for any framework.

Read ``process`` first (init, shutdown, failure), then ``runtime``, which owns the communication
thread. ``engine`` reduces the gradients of one optimizer by a plan, ``progress`` moves
communication on, ``transport`` is what gradients lie in, ``tuning`` chooses plans, ``collectives``
are named operations and ``api`` what programs call on arrays. ``step`` holds the facts of one step
that these share, ``consistency`` what ranks compare before they begin, ``arguments`` what a caller
may ask for.
"""
