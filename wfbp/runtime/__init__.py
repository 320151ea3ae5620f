"""What one rank does together with the others, for any framework.

Read ``process`` first (init, shutdown), then ``runtime``, which owns the communication thread.
``reducer`` is the training side of one optimizer and ``lane`` its communication side; ``buffers``
are what gradients lie in. ``progress`` moves communication on, ``tuning`` chooses plans,
``collectives`` are named operations and ``api`` what programs call on arrays. ``step`` holds the
facts of one step that these share, ``consistency`` what ranks compare before they begin,
``signals`` postpones signal handlers, ``uncaught`` ends the job after an exception.

Imports start no thread and touch no signal, hook or MPI: that is done by ``init()`` (the
communication thread, exception hooks, ``atexit``, a fork handler) and undone by ``shutdown()``.
Importing has these effects only:

* ``wfbp.torch`` has ``shutdown()`` finish pending updates first (``process.before_end``) and waits
  for them before a fork.
* ``wfbp.collectives`` and ``wfbp.torch.collectives`` generate their functions from one table.
* ``wfbp.native`` loads the C++ extension.
"""
