"""What tests call the ways in which an optimizer's update is shared out."""

from __future__ import annotations

SHARDING: dict[str, bool | None] = {"auto": None, "sharded": True, "replicated": False}
"""By name, the argument ``optimizer_sharding`` of ``DistributedOptimizer``."""
