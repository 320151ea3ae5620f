"""One optimizer's gradients, from ready events to averaged values.

Read ``engine`` first: what adapters call. ``tracker`` notes which gradients exist and posts events;
``allgather`` is the training thread's side of all-gathers; ``step_sync`` is the exchange at the end
of a step, which happens only where a rank asks for it. ``recorder`` writes records of runs,
``allocator`` keeps freed memory with the process.
"""
