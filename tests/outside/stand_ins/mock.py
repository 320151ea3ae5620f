"""The package ``mock``, which Python has long had as ``unittest.mock``."""

from unittest.mock import *  # noqa: F403
