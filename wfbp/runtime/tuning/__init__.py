"""Chooses the plan that runs; no threads here.

Read ``tuner`` first. ``trial`` compares plans in rounds, ``candidates`` lists plans to try,
``profile`` turns time stamps into a trace, ``network`` measures cost curves.
"""
