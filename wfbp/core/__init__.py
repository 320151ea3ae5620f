"""Pure facts and decisions: no threads, no MPI, no frameworks.

Read ``types`` and ``trace`` first (what is known of a step), ``cost`` (what a message takes), then
``plan`` and ``timeline``: what a plan makes of both. ``planners`` make plans, ``bound`` is what
none can beat, ``sequencer`` decides at run time what is sent next, ``fit`` gets costs from
measurements.
"""
