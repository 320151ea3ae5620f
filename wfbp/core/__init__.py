"""Pure facts and decisions: no threads, no MPI, no frameworks.

Read ``types``, ``trace`` (compute), ``cost`` (network), ``plan``, ``timeline``; ``planners`` make
plans, ``bound`` limits them, ``sequencer`` picks the next message, ``fit`` derives costs.
"""
