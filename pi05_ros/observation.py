"""What the policy is asked: one observation of the robot, from whichever door it came."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class Observation:
    """One synchronous observation in the robot's own terms.

    Attributes:
        images: camera name (as the profile names it) -> RGB image, uint8 [height, width, 3], any size.
            A camera that the profile marks optional may be left out; it is then masked.
        state: robot state, float [dims], in the profile's order and units.
        prompt: the instruction; ``None`` where the caller gives none.
        stamp_ns: the anchor camera's stamp in nanoseconds of the node's clock; ``None`` outside ROS.
        input_stamps_ns: input name -> stamp in nanoseconds, cameras first, then state sources.
    """

    images: Mapping[str, np.ndarray]
    state: np.ndarray
    prompt: str | None = None
    stamp_ns: int | None = None
    input_stamps_ns: Mapping[str, int] = field(default_factory=dict)
