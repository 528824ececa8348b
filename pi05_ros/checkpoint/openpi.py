"""OpenPI's PyTorch folders: model.safetensors, perhaps a config.json, and assets/<id>/norm_stats.json.

OpenPI keeps the robot's conventions (cameras, widths, prompt, delta mask) in its training code, not in the folder;
what the folder leaves open comes from the robot profile and is listed in ``Checkpoint.notes``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pi05_ros.checkpoint.description import Checkpoint, read_json
from pi05_ros.checkpoint.folder import find_tokenizer, find_weights
from pi05_ros.checkpoint.headers import StoredTensor, fingerprint
from pi05_ros.checkpoint.keys import canonical_key
from pi05_ros.checkpoint.sizes import network_config
from pi05_ros.checkpoint.statistics import Statistics, read_statistics
from pi05_ros.errors import CheckpointError

# openpi's `Observation`: the only three image keys, in this order.
CAMERAS = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")
# openpi's `Pi0Config` for Pi0.5.
_ACTION_DIM, _HORIZON = 32, 50
# Default of openpi's `sample_actions`.
_NUM_STEPS = 10


def read(
    path: Path,
    identity: str,
    commit: str | None,
    assets: str | None,
    statistics: Mapping[str, Statistics] | None,
) -> Checkpoint:
    """Describe an OpenPI folder; ``statistics`` replace its own.

    Raises:
        CheckpointError: ``checkpoint.choose_assets``, ``checkpoint.unknown_assets``, ``checkpoint.wrong_type``,
            ``checkpoint.bad_config``, and those of `folder`, `sizes`, `headers`, `statistics`.
    """
    file = path / "config.json"
    raw: dict[str, Any] = read_json(file) if file.exists() else {}
    notes = [f"OpenPI states no denoise steps: {_NUM_STEPS}, its default"]
    action_dim = _positive(raw, "action_dim", _ACTION_DIM, file)
    horizon = _positive(raw, "action_horizon", _HORIZON, file)
    if not raw:
        notes.append(f"no config.json: full size, action_dim {action_dim}, horizon {horizon} (OpenPI's defaults)")
    network = network_config(raw, file, action_dim=action_dim, horizon=horizon)
    tensors = find_weights(path)
    _refuse_pi0(path, tensors)
    files = [file] if file.exists() else []
    found: Mapping[str, Statistics] = {}
    chosen = None
    if statistics is not None:
        found = statistics
    else:
        chosen = _choose_assets(path, assets)
        if chosen is not None:
            files.append(path / "assets" / chosen / "norm_stats.json")
            found = read_statistics(files[-1])
    for feature, entry in found.items():
        if entry.width > action_dim:
            raise CheckpointError(
                "bad_statistics", f"{path}: {feature} statistics are {entry.width} wide, the model {action_dim}"
            )
    return Checkpoint(
        path=path,
        format="openpi",
        id=identity,
        revision=commit,
        fingerprint=fingerprint(tensors, files),
        config=network,
        cameras=CAMERAS,
        empty_cameras=(),
        state_dim=action_dim,
        action_dim=action_dim,
        num_steps=_NUM_STEPS,
        executed_steps=None,
        state_in_prompt=None,
        resize="pil",
        absent_camera_order="in_place",
        state_statistics=found.get("state"),
        action_statistics=found.get("action"),
        # openpi: quantile statistics for every model but Pi0.
        state_normalization="quantile",
        action_normalization="quantile",
        normalization_style="openpi",
        tokenizer_path=find_tokenizer(path),
        tokenizer_name="paligemma_tokenizer.model",
        weight_files=tuple(dict.fromkeys(tensor.file for tensor in tensors)),
        full_size_assumed="architecture" not in raw,
        assets=chosen,
        notes=tuple(notes),
    )


def _positive(raw: dict[str, Any], key: str, default: int, file: Path) -> int:
    value = raw.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError("bad_config", f"{file}: {key} is {value!r}; a positive whole number was expected")
    return value


def _choose_assets(path: Path, wanted: str | None) -> str | None:
    """Asset ids may contain slashes (``physical-intelligence/libero``)."""
    root = path / "assets"
    ids = sorted(file.parent.relative_to(root).as_posix() for file in root.rglob("norm_stats.json"))
    if wanted is not None:
        if wanted not in ids:
            raise CheckpointError("unknown_assets", f"{root} has no statistics for {wanted!r}; it has {ids}")
        return wanted
    if len(ids) > 1:
        raise CheckpointError(
            "choose_assets", f"{root} holds statistics of several robots: {ids}; name one as `assets`", {"assets": ids}
        )
    return ids[0] if ids else None


def _refuse_pi0(path: Path, tensors: list[StoredTensor]) -> None:
    """Pi0 folders look the same; their expert has plain norms where Pi0.5's are adaptive."""
    keys = {tensor.key.removeprefix("model.") for tensor in tensors}
    adaptive = any(key.endswith(".input_layernorm.dense.weight") for key in keys)
    if "state_proj.weight" in keys and not adaptive:
        raise CheckpointError("wrong_type", f"{path} holds weights of Pi0 (state_proj, no adaptive norms), not Pi0.5")
    if not any((canonical_key(key) or "").startswith("paligemma_with_expert.") for key in keys):
        raise CheckpointError(
            "unknown_format",
            f"{path}: its weights are not of a PaliGemma with expert; they begin with {sorted(keys)[:5]}",
        )
