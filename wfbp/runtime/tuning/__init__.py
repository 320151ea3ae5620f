"""Which plan runs when.

Read ``tuner`` first: profile, plan, try, keep the fastest, plan anew when times drift. ``trial``
compares plans in rounds; ``candidates`` are the plans worth a trial, ``profile`` turns time stamps
into a trace, ``network`` measures the cost curves. Nothing here knows of threads.
"""
