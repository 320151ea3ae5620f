"""Collectives on arrays, parameter broadcasts, and gradient reduction for arrays."""
