"""A simulated robot: joints that follow their commands as first-order systems, x' = (command - x) / tau."""

from __future__ import annotations

import numpy as np


class FirstOrderPlant:
    """Joints with the same time constant.

    Args:
        start: float64 [joints], where they stand and what they are commanded until a command comes.
        tau_s: time constant; a real arm's position loop has 0.02 to 0.1 s.
    """

    def __init__(self, start: np.ndarray, tau_s: float = 0.05) -> None:
        self.position = np.array(start, dtype=np.float64)
        self.velocity = np.zeros_like(self.position)
        self.command = self.position.copy()
        self.tau_s = tau_s

    def step(self, seconds: float) -> np.ndarray:
        """Let time pass (exact for a command that stays); returns a copy of the positions."""
        before = self.position.copy()
        self.position = self.command + (before - self.command) * np.exp(-seconds / self.tau_s)
        self.velocity = (self.position - before) / seconds
        return self.position.copy()
