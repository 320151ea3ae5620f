"""Scales costs to other numbers of workers, and predicts iterations there."""
