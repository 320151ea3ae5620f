"""Replays plans on a virtual clock, and carries costs from one cluster over to others."""
