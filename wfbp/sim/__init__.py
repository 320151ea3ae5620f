"""Replays plans on a virtual clock, and scales costs to other clusters."""
