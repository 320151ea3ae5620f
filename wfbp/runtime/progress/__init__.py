"""Communication progress: one loop, driven by one thread at a time.

Read ``loop`` first, then ``thread`` (which thread drives), ``stall`` (long waits), ``channel``
(control data) and ``fetching`` (data from other ranks while their training threads are busy).
"""
