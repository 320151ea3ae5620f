"""Benchmarks, by which wfbp is judged: ``python -m tests.benchmarks NAME``.

``machine`` and ``harness`` are what they share; ``torch_contestants`` and ``jax_contestants`` have
models and contestants, ``*_worker`` are what ranks run; every other file is one benchmark, and
``validation`` compares the model of time with published measurements.
"""
