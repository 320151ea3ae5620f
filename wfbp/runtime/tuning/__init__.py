"""Which plan runs when.

Read ``tuner`` first: profile, plan, try, keep the fastest, notice when it no longer is. ``trial``
runs plans in rounds and decides when a trial is over and which plan has won; ``candidates`` are the
plans worth a trial, ``profile`` turns time stamps into a trace, ``network`` measures the cost
curves. Nothing here knows of threads.
"""
