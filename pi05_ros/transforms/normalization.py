"""Normalisation of states and actions by the training set's statistics, each reference with its own rounding guards.

=========  ====================================  ==========================================
           lerobot (float32)                     openpi (float64)
=========  ====================================  ==========================================
quantile   2 (x - q01) / d - 1, d = q99 - q01,   2 (x - q01) / (q99 - q01 + 1e-6) - 1
           and 1e-8 only where that is 0
mean_std   (x - mean) / (std + 1e-8);            (x - mean) / (std + 1e-6);
           inverse y std + mean                  inverse y (std + 1e-6) + mean
=========  ====================================  ==========================================

Nothing is clipped in either direction: a flow head may leave [-1, 1], and limits belong to robot units.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from pi05_ros.checkpoint.statistics import Statistics
from pi05_ros.errors import CheckpointError, ConfigurationError, ContractError

NormalizationKind = Literal["quantile", "mean_std", "identity"]
NormalizationStyle = Literal["lerobot", "openpi"]

LEROBOT_EPS = 1e-8
OPENPI_EPS = 1e-6
# Below the resolution of a joint encoder (4096 counts per turn: 1.5e-3 rad): the dimension did not move in training,
# and normalising it multiplies any noise by more than 1e4.
NEAR_CONSTANT_SPAN = 1e-4

_FIELDS = {"quantile": ("q01", "q99"), "mean_std": ("mean", "std"), "identity": ()}


class Normalizer:
    """Robot units (after `transforms.robots`) to model numbers and back, over the last axis.

    Args:
        statistics: of the training set; ``None`` only for ``identity``.
        kind: which statistics are used.
        style: whose formula, and whose dtype: ``lerobot`` answers float32, ``openpi`` float64.
        name: ``state`` or ``action``; for messages.

    Attributes:
        width: dimensions that the statistics cover; ``None`` for ``identity``.

    Raises:
        CheckpointError: ``checkpoint.statistics_missing`` where the fields that ``kind`` needs are not there. (That
            they are finite, of one width and in order is checked where statistics are read.)
    """

    def __init__(
        self,
        statistics: Statistics | None,
        kind: NormalizationKind,
        style: NormalizationStyle,
        name: str = "values",
    ) -> None:
        if kind not in _FIELDS:
            raise ConfigurationError("normalization", f"normalization is one of {', '.join(_FIELDS)}, got {kind!r}")
        if style not in ("lerobot", "openpi"):
            raise ConfigurationError("normalization", f"the normalization style is lerobot or openpi, got {style!r}")
        self.kind = kind
        self.style = style
        self.name = name
        self.dtype = np.dtype(np.float32 if style == "lerobot" else np.float64)
        self.width: int | None = None
        if kind == "identity":
            return
        statistics = statistics or Statistics()
        missing = statistics.missing(kind)
        if missing:
            raise CheckpointError(
                "statistics_missing",
                f"{name}: {kind} normalisation needs {' and '.join(_FIELDS[kind])}, and the statistics hold "
                f"{', '.join(statistics.available()) or 'nothing'}; give a statistics file that holds "
                f"{' and '.join(missing)}, or say `normalization: none`",
                {"missing": list(missing), "present": list(statistics.available())},
            )
        first, second = (np.asarray(getattr(statistics, field)) for field in _FIELDS[kind])
        self.width = len(first)
        self._low, self._high = first.astype(self.dtype), second.astype(self.dtype)
        # [width]: what the difference to the origin (q01 or mean) is divided by, and multiplied with on the way back.
        if kind == "quantile":
            self._divisor = self._high - self._low
            if style == "lerobot":
                self._divisor[self._divisor == 0] = LEROBOT_EPS
            else:
                self._divisor = self._divisor + OPENPI_EPS
            self._multiplier = self._divisor
        else:
            self._divisor = self._high + self.dtype.type(LEROBOT_EPS if style == "lerobot" else OPENPI_EPS)
            self._multiplier = self._high if style == "lerobot" else self._divisor

    def normalize(self, values: np.ndarray) -> np.ndarray:
        """Float [..., D] in robot units to [..., D] in model numbers, newly allocated.

        D is the statistics' width. OpenPI's statistics may be wider (padded); then the first D are used.

        Raises:
            ContractError: ``contract.statistics_width``.
        """
        values = np.array(values, dtype=self.dtype)
        if self.width is None:
            return values
        dims = self._width_of(values)
        if dims > self.width or (dims < self.width and self.style == "lerobot"):
            raise self._width_error(dims)
        low, divisor = self._low[:dims], self._divisor[:dims]
        if self.kind == "mean_std":
            return (values - low) / divisor
        if self.style == "lerobot":
            return 2.0 * (values - low) / divisor - 1.0
        return (values - low) / divisor * 2.0 - 1.0

    def unnormalize(self, values: np.ndarray) -> np.ndarray:
        """Float [..., D] in model numbers to [..., D] in robot units, newly allocated.

        D is the statistics' width. In OpenPI's style D may be larger (padded actions): further dimensions pass through,
        and mean_std scales them by 1 + 1e-6, since the reference pads the mean with 0 and the deviation with 1.

        Raises:
            ContractError: ``contract.statistics_width``.
        """
        values = np.array(values, dtype=self.dtype)
        if self.width is None:
            return values
        dims = self._width_of(values)
        if dims < self.width or (dims > self.width and self.style == "lerobot"):
            raise self._width_error(dims)
        known, further = values[..., : self.width], values[..., self.width :]
        if self.kind == "mean_std":
            known[...] = known * self._multiplier + self._low
            further *= 1.0 + OPENPI_EPS
        elif self.style == "lerobot":
            known[...] = (known + 1.0) * self._multiplier / 2.0 + self._low
        else:
            known[...] = (known + 1.0) / 2.0 * self._multiplier + self._low
        return values

    def near_constant_dimensions(self, span: float = NEAR_CONSTANT_SPAN) -> tuple[int, ...]:
        """Dimensions that hardly moved in training (q99 - q01, or the deviation, at most ``span`` in data units)."""
        if self.width is None:
            return ()
        spread = self._high - self._low if self.kind == "quantile" else self._high
        return tuple(int(i) for i in np.flatnonzero(spread <= span))

    def outside_dimensions(self, normalized: np.ndarray) -> tuple[int, ...]:
        """Dimensions of a normalised vector [D] beyond q01..q99; empty unless ``kind`` is ``quantile``."""
        if self.kind != "quantile":
            return ()
        return tuple(int(i) for i in np.flatnonzero(np.abs(normalized) > 1.0))

    def _width_of(self, values: np.ndarray) -> int:
        if values.ndim == 0:
            raise ContractError("statistics_width", f"{self.name}: expected a vector, got a scalar")
        return int(values.shape[-1])

    def _width_error(self, dims: int) -> ContractError:
        return ContractError(
            "statistics_width",
            f"{self.name}: got {dims} dimensions, and the checkpoint's statistics cover {self.width}; "
            "the profile and the checkpoint do not describe the same robot",
            {"got": dims, "statistics": self.width},
        )
