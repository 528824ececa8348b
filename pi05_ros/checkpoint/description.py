"""What a checkpoint says about itself, in one form for both formats."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pi05_ros.checkpoint.statistics import Statistics
from pi05_ros.errors import CheckpointError
from pi05_ros.model.config import Pi05Config

Normalization = Literal["quantile", "mean_std", "identity"]


@dataclass(frozen=True)
class RelativeActions:
    """Which action dimensions the model gives relative to the state at the chunk's start.

    Attributes:
        mask: [action_dim]; True where ``absolute = action + state`` is to be computed, in robot units.
        excluded: the words by which the checkpoint keeps dimensions absolute, e.g. ("gripper",).
    """

    mask: tuple[bool, ...]
    excluded: tuple[str, ...] = ()


@dataclass(frozen=True)
class Checkpoint:
    """Everything about a checkpoint but the weights themselves.

    Attributes:
        path: the folder.
        format: whose conventions hold.
        id: hub id, or the folder's name.
        revision: commit of a hub checkpoint; None for a local folder.
        fingerprint: SHA-256 of the content (`headers.fingerprint`); copies share it, fine-tunes do not.
        config: sizes of the network.
        cameras: every camera slot of the prefix in the model's own order, empty ones included, without the
            ``observation.images.`` prefix.
        empty_cameras: those of ``cameras`` that no robot feeds (always masked).
        camera_aliases: other name -> slot, from the checkpoint's rename map.
        state_dim: widest state; LeRobot states it, OpenPI pads to the model's width and states nothing.
        action_dim: width of an unnormalised action; as ``state_dim``.
        action_names: names of the action's dimensions in order, where the checkpoint has them.
        num_steps: denoise steps.
        executed_steps: rows of a chunk to execute before the next; None where not stated.
        state_in_prompt: whether the prompt carries the state; None where not stated.
        resize: "torch" (no antialias, on floats) or "pil" (antialiased, on uint8).
        absent_camera_order: where the prefix has the slots of absent cameras: behind the present ones or in place.
        state_statistics, action_statistics: None where the checkpoint has none.
        state_normalization, action_normalization: the kind that the checkpoint states.
        normalization_style: whose formula (they differ in the epsilon).
        relative_actions: None where actions are absolute; also where the format does not state it (OpenPI).
        tokenizer_path: tokenizer.json or SentencePiece model in the folder, if any.
        tokenizer_name: what the checkpoint calls its tokenizer, for messages.
        weight_files: the safetensors files with the weights, and no others.
        full_size_assumed: the folder states no sizes, so the published ones are expected.
        assets: OpenPI's asset id whose statistics these are.
        notes: what the folder leaves open and is taken as a default, one sentence each; to be shown to the user.
    """

    path: Path
    format: Literal["lerobot", "openpi"]
    id: str
    revision: str | None
    fingerprint: str
    config: Pi05Config
    cameras: tuple[str, ...]
    empty_cameras: tuple[str, ...]
    state_dim: int
    action_dim: int
    num_steps: int
    executed_steps: int | None
    state_in_prompt: bool | None
    resize: Literal["torch", "pil"]
    absent_camera_order: Literal["last", "in_place"]
    state_normalization: Normalization
    action_normalization: Normalization
    normalization_style: Literal["lerobot", "openpi"]
    weight_files: tuple[Path, ...]
    full_size_assumed: bool
    state_statistics: Statistics | None = None
    action_statistics: Statistics | None = None
    action_names: tuple[str, ...] | None = None
    camera_aliases: Mapping[str, str] = field(default_factory=dict)
    relative_actions: RelativeActions | None = None
    tokenizer_path: Path | None = None
    tokenizer_name: str | None = None
    assets: str | None = None
    notes: tuple[str, ...] = ()


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        CheckpointError: ``checkpoint.missing_file``, ``checkpoint.bad_json``.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError("missing_file", f"{file} cannot be read: {error}") from error
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise CheckpointError("bad_json", f"{file} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError("bad_json", f"{file}: a JSON object was expected, got {type(content).__name__}")
    return content
