"""Normalisation statistics of state and action, from the files the two communities write."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from pi05_ros.errors import CheckpointError

# What each file calls the two features.
_FEATURES = {
    "state": ("observation.state", "state"),
    "action": ("action", "actions"),
}
# What each kind of normalisation reads.
_NEEDS: dict[str, tuple[str, ...]] = {"quantile": ("q01", "q99"), "mean_std": ("mean", "std"), "identity": ()}


@dataclass(frozen=True)
class Statistics:
    """Per-dimension statistics of one feature; each array is [width] in the data set's units, or None where not given.

    The dtype is the file's own: float64 from JSON, float32 from processor files.
    """

    mean: np.ndarray | None = None
    std: np.ndarray | None = None
    q01: np.ndarray | None = None
    q99: np.ndarray | None = None
    min: np.ndarray | None = None
    max: np.ndarray | None = None

    @property
    def width(self) -> int:
        """Number of dimensions."""
        return next(len(array) for array in self._arrays().values())

    def missing(self, kind: str) -> tuple[str, ...]:
        """Names of the arrays that ``kind`` ("quantile", "mean_std" or "identity") needs and that are not here."""
        return tuple(name for name in _NEEDS[kind] if getattr(self, name) is None)

    def available(self) -> tuple[str, ...]:
        """Names of the arrays that are here."""
        return tuple(self._arrays())

    def _arrays(self) -> dict[str, np.ndarray]:
        arrays = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: array for name, array in arrays.items() if array is not None}


def read_statistics(path: str | Path) -> dict[str, Statistics]:
    """Read OpenPI's ``norm_stats.json``, LeRobot's ``stats.json`` or a LeRobot processor's safetensors file.

    Returns:
        Up to two entries, ``state`` and ``action``; other features of the file (images, timestamps) are left out.

    Raises:
        CheckpointError: ``checkpoint.missing_file``, ``checkpoint.unreadable_statistics`` (not one of the three
            formats), ``checkpoint.bad_statistics`` (not finite, widths that differ, quantiles in the wrong order).
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise CheckpointError("missing_file", f"statistics file {file} does not exist; give the file, not its folder")
    table = _read_safetensors(file) if file.suffix == ".safetensors" else _read_json(file)
    found = {}
    for feature, spellings in _FEATURES.items():
        present = [name for name in spellings if name in table]
        if len(present) > 1:
            raise CheckpointError("bad_statistics", f"{file} holds both {present[0]} and {present[1]}; one is expected")
        if present:
            statistics = _statistics(table[present[0]], f"{file}: {present[0]}")
            if statistics is not None:
                found[feature] = statistics
    return found


def _read_safetensors(file: Path) -> dict[str, dict[str, Any]]:
    try:
        tensors = load_file(file)
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError("unreadable_statistics", f"{file} cannot be read as safetensors: {error}") from error
    table: dict[str, dict[str, Any]] = {}
    for key, tensor in tensors.items():
        feature, _, name = key.rpartition(".")
        table.setdefault(feature, {})[name] = tensor
    return table


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError("unreadable_statistics", f"{file} cannot be read as JSON: {error}") from error
    table = content.get("norm_stats", content) if isinstance(content, dict) else None
    if not isinstance(table, dict):
        raise CheckpointError(
            "unreadable_statistics",
            f"{file} is none of OpenPI's norm_stats.json ({{'norm_stats': {{'state', 'actions'}}}}), LeRobot's "
            "stats.json ({'observation.state', 'action'}) and a LeRobot processor's .safetensors file",
        )
    return table


def _statistics(entry: Any, where: str) -> Statistics | None:
    if not isinstance(entry, Mapping):
        raise CheckpointError("bad_statistics", f"{where}: a table of arrays was expected, got {type(entry).__name__}")
    arrays: dict[str, np.ndarray] = {}
    for field in fields(Statistics):
        value = entry.get(field.name)
        if value is None:
            continue
        try:
            array = np.asarray(value)
            array = array.astype(np.float64 if array.dtype.kind in "iu" else array.dtype)
        except (TypeError, ValueError) as error:
            raise CheckpointError("bad_statistics", f"{where}.{field.name} is no array of numbers: {error}") from error
        if array.dtype.kind != "f" or array.ndim != 1 or array.size == 0:
            raise CheckpointError(
                "bad_statistics",
                f"{where}.{field.name}: one row of numbers was expected, got dtype {array.dtype}, shape {array.shape}",
            )
        if not np.isfinite(array).all():
            raise CheckpointError(
                "bad_statistics",
                f"{where}.{field.name} is not finite at {np.flatnonzero(~np.isfinite(array)).tolist()}",
            )
        arrays[field.name] = array
    if not arrays:
        return None
    widths = {name: len(array) for name, array in arrays.items()}
    if len(set(widths.values())) > 1:
        raise CheckpointError("bad_statistics", f"{where}: arrays of one width were expected, got {widths}")
    for low, high in (("q01", "q99"), ("min", "max")):
        if low in arrays and high in arrays and (arrays[low] > arrays[high]).any():
            wrong = np.flatnonzero(arrays[low] > arrays[high]).tolist()
            raise CheckpointError("bad_statistics", f"{where}: {low} lies above {high} in dimensions {wrong}")
    if "std" in arrays and (arrays["std"] < 0).any():
        raise CheckpointError(
            "bad_statistics", f"{where}: std is negative at {np.flatnonzero(arrays['std'] < 0).tolist()}"
        )
    return Statistics(**arrays)
