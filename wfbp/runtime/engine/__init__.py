"""One optimizer's gradients, from ready events to averaged values.

Read ``engine`` first: what adapters call. ``tracker`` notes which gradients exist and posts events;
``allgather`` is what the training thread knows of all-gathers; ``step_sync`` is the exchange at a
step's end that happens only where a rank asks for it. ``recorder`` writes what was done,
``allocator`` keeps freed memory with the process.
"""
