"""Benchmarks of wfbp: ``python -m tests.benchmarks NAME``.

``machine``, ``jobs`` and ``turns`` are what they share; ``models`` and ``jax_contestants`` have
models and contestants, ``*_worker`` are what ranks run; every other file is one benchmark, and
``validation`` compares the model of time with published measurements.
"""
