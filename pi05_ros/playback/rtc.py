"""A leftover in the network's numbers, for `pi05_ros.engine.chunking`."""

from __future__ import annotations

import numpy as np

from pi05_ros.engine.chunking import RealTimeChunking
from pi05_ros.playback.leftover import Continuation
from pi05_ros.transforms.normalization import Normalizer
from pi05_ros.transforms.robots import StateActionConvention


def bound_to(continuation: Continuation, rows: np.ndarray | None = None) -> RealTimeChunking:
    """The continuation as the engine takes it; ``rows`` (float [L, dims]) instead of its own."""
    settings = continuation.settings
    leftover = np.asarray(continuation.rows if rows is None else rows, dtype=np.float32)
    return RealTimeChunking(
        leftover=leftover,
        delay=continuation.delay,
        mode=settings.mode,
        execution_horizon=max(continuation.delay + settings.fade_rows, 1),
        schedule=settings.schedule,
        max_guidance_weight=settings.max_guidance_weight,
    )


def model_leftover(
    continuation: Continuation,
    convention: StateActionConvention,
    normalizer: Normalizer,
    model_state: np.ndarray,
) -> RealTimeChunking:
    """The continuation relative to the new state where the model is relative, and normalised.

    Args:
        model_state: float [dims], the new observation's state in the model's units, not normalised.
    """
    return bound_to(continuation, normalizer.normalize(convention.actions_to_model(continuation.rows, model_state)))
