"""What one run of the training benchmark is asked to do; how the command tells its ranks."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Settings:
    """One model's run.

    Args:
        model: key of the registry of models.
        contestants: their names.
        iterations: to keep per contestant.
        patience: stop after this many times the rounds that a quiet machine would need.
        max_foreign_cores: foreign load above which a block is dropped.
        warm_up_steps: within which wfbp must have installed its plan.
        link: rate of the link, or "none".
        interface: network interface whose bytes are counted; empty where there is no link.
        result: file that rank 0 writes.
    """

    model: str
    contestants: tuple[str, ...]
    iterations: int
    patience: float
    max_foreign_cores: float
    warm_up_steps: int
    link: str
    interface: str
    result: str

    @classmethod
    def load(cls, path: str) -> Settings:
        """Settings from a JSON file."""
        data = json.loads(Path(path).read_text())
        return cls(**{**data, "contestants": tuple(data["contestants"])})

    def save(self, path: Path) -> None:
        """Write them where :meth:`load` reads them."""
        path.write_text(json.dumps(asdict(self)))
