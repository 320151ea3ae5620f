"""Connects one rank to the others, for any framework.

Read ``process`` first (init, shutdown), then ``runtime`` (communication thread, channels, lanes),
``reducer`` (training side of one optimizer), ``lane`` and ``buffers`` (communication side). Imports
start no thread and touch no signal, exception hook or MPI; ``init()`` and ``shutdown()`` do. All
side effects of imports in the package:

* ``wfbp.native`` loads the C++ extension.
* ``wfbp.comm.mpi.shm_memory`` registers a hook that maps this rank's memory anew in forked
  processes.
* ``wfbp.torch`` (``pending``) waits for parameters before a fork, a script function and the making
  of a script module, and registers its parameter class with ``torch.utils._pytree``; (``ending``)
  completes parameters in ``shutdown()``.
* ``import torch`` calls ``wfbp.integrations.torch_backend`` by an entry point, which registers the
  backend ``wfbp`` and puts a handler before PyTorch's own for ``env://``.
* ``wfbp.torch.distributed`` serves ``wfbp://`` and ``env://`` and replaces two functions of
  ``torch.distributed``.
* ``wfbp.jax`` registers primitives with JAX, and forgets programs of one rank in ``shutdown()``.
* ``wfbp.horovod.search_path`` is put on ``sys.path`` by ``python -m wfbp.horovod`` alone; importing
  ``horovod`` from there makes ``wfbp.horovod`` replace it.
"""
