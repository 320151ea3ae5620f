"""A machine that is not quiet, simulated."""

from __future__ import annotations

import math
import random


class Machine:
    """Iterations with heavy tails, disturbed stretches and a speed that drifts."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.noise = self.chance.choice([0.02, 0.05, 0.1])
        self.disturbances = self.chance.choice([0, 0.005, 0.02])
        self.drift = self.chance.choice([0, 0.002, 0.005])
        self.disturbed_steps, self.factor, self.speed = 0, 1.0, 1.0

    def step(self, seconds: float) -> float:
        chance = self.chance
        self.disturbed_steps -= 1
        if self.disturbed_steps < 0 and chance.random() < self.disturbances:
            self.disturbed_steps, self.factor = chance.randint(3, 25), 1 + 0.5 * chance.random()
        self.speed *= math.exp(self.drift * chance.gauss(0, 1))
        tail = min(chance.paretovariate(2.5) - 1, 3.0) if chance.random() < 0.1 else 0.0
        noise = math.exp(abs(chance.gauss(0, self.noise))) * (1 + tail)
        return seconds * noise * self.speed * (self.factor if self.disturbed_steps >= 0 else 1.0)
