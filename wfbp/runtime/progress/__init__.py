"""How communication moves on: one loop, driven by one thread at a time.

Read ``loop`` first: it moves collectives and lanes on, and says how long nothing need be done.
``thread`` decides who drives it, the communication thread or a training thread that waits.
``stall`` judges long waits. ``channel`` offers collectives for control data, ``fetching`` gets data
from other ranks while their training threads do something else.
"""
