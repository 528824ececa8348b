"""Which kind of checkpoint a folder is, decided by what lies in it."""

from __future__ import annotations

from pathlib import Path

from pi05_ros.checkpoint import lerobot, openpi
from pi05_ros.checkpoint.description import Checkpoint, RelativeActions, read_json
from pi05_ros.checkpoint.hub import resolve_source
from pi05_ros.checkpoint.statistics import read_statistics
from pi05_ros.errors import CheckpointError

__all__ = ["Checkpoint", "RelativeActions", "open_checkpoint"]

_ORBAX_MARKS = ("params/_METADATA", "params/manifest.ocdbt", "_METADATA", "_CHECKPOINT_METADATA", "manifest.ocdbt")
_PEFT_MARKS = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")
_PICKLE_PATTERNS = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def open_checkpoint(
    source: str | Path,
    revision: str | None = None,
    *,
    assets: str | None = None,
    statistics: str | Path | None = None,
) -> Checkpoint:
    """Read everything about a checkpoint but its weights.

    Args:
        source: a folder, or a hub id ``owner/name``.
        revision: branch, tag or commit of a hub id.
        assets: OpenPI's asset id, where ``assets/`` holds several.
        statistics: a file whose state and action statistics replace the checkpoint's own.

    Raises:
        CheckpointError: with a code that tells what is wrong; `hub.resolve_source`, `headers.read_headers`,
            `statistics.read_statistics`, `lerobot.read` and `openpi.read` name theirs. Its own:
            ``checkpoint.peft_adapter``, ``checkpoint.orbax``, ``checkpoint.pickle``, ``checkpoint.wrong_type``,
            ``checkpoint.unknown_format``, ``checkpoint.not_this_format``.
    """
    path, identity, commit = resolve_source(source, revision)
    kind = _detect(path)
    replacement = None if statistics is None else read_statistics(statistics)
    if kind == "openpi":
        return openpi.read(path, identity, commit, assets=assets, statistics=replacement)
    if assets is not None:
        raise CheckpointError(
            "not_this_format", f"{path} is a LeRobot folder and has no assets; asset id {assets!r} fits OpenPI only"
        )
    return lerobot.read(path, identity, commit, statistics=replacement)


def _detect(path: Path) -> str:
    peft = [name for name in _PEFT_MARKS if (path / name).exists()]
    if peft:
        raise CheckpointError(
            "peft_adapter",
            f"{path} is a PEFT adapter ({peft[0]}), not a whole model; merge it into its base with peft's "
            "`merge_and_unload()`, save the result with `save_pretrained`, and give that folder",
        )
    weights = [name for name in ("model.safetensors", "model.safetensors.index.json") if (path / name).exists()]
    if not weights:
        _refuse_without_weights(path)
    if (path / "config.json").exists():
        config = read_json(path / "config.json")
        if "type" in config:
            if config["type"] == "pi05":
                return "lerobot"
            raise CheckpointError(
                "wrong_type",
                f"{path / 'config.json'} says type {config['type']!r}; 'pi05' is the only one that runs here",
            )
        if "model_type" in config or "architectures" in config:
            raise CheckpointError(
                "wrong_type",
                f"{path / 'config.json'} is of a transformers model ({config.get('model_type')!r}), not a Pi0.5 policy",
            )
        if {"action_dim", "action_horizon"} <= config.keys():
            return "openpi"
        raise CheckpointError(
            "unknown_format",
            f"{path / 'config.json'} has neither LeRobot's `type` nor OpenPI's `action_dim` and `action_horizon`; "
            f"it has {sorted(config)[:10]}",
        )
    processors = [name for name in lerobot.PROCESSOR_FILES if (path / name).exists()]
    if processors:
        raise CheckpointError(
            "missing_file", f"{path} looks like a LeRobot folder ({processors[0]}) without config.json"
        )
    return "openpi"


def _refuse_without_weights(path: Path) -> None:
    for mark in _ORBAX_MARKS:
        if (path / mark).exists():
            raise CheckpointError(
                "orbax",
                f"{path} is a JAX (Orbax) checkpoint ({mark}); convert it with openpi's "
                "examples/convert_jax_model_to_pytorch.py and give the folder it writes",
            )
    pickles = sorted(file.name for pattern in _PICKLE_PATTERNS for file in path.glob(pattern))
    if pickles:
        raise CheckpointError(
            "pickle", f"{path} holds pickled weights ({pickles[0]}), which are never opened; save them as safetensors"
        )
    inner = [name for name in ("pretrained_model", "checkpoints/last/pretrained_model") if (path / name).is_dir()]
    hint = f"; did you mean {path / inner[0]}?" if inner else ""
    found = sorted(file.name for file in path.iterdir())[:10]
    raise CheckpointError(
        "unknown_format",
        f"{path} holds no model.safetensors and no model.safetensors.index.json (LeRobot: beside config.json of type "
        f"pi05; OpenPI: beside assets/<id>/norm_stats.json); it holds {found}{hint}",
    )
