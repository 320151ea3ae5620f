"""Which plan runs when.

Read ``tuner`` first: profile, plan, try, keep what is fastest, notice when it no longer is.
``candidates`` are the plans worth a trial, ``trial`` compares them, ``profile`` turns time stamps
into a trace, ``network`` measures the cost curves. Nothing here knows of threads.
"""
