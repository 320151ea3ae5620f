"""How communication moves on: one loop, driven by one thread at a time.

Read ``loop`` first: it moves calls and lanes on, and says how long nothing need be done. ``thread``
decides who drives it, the communication thread or a training thread that waits. ``lane``
sends the groups of a plan in the order that the pure ``core.sequencer`` decides. ``channel`` offers
collectives for control data, ``fetching`` gets data from other ranks while their training threads
do something else, ``deadlock`` judges long waits.
"""
