"""Random checkpoints in the real formats, at any size, for tests, demos and measurements.

Every tensor comes from a generator seeded by its own name, so a size and a seed give the same weights bit for bit on
every machine, whatever else the folder holds and however it is sharded.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import save_file

from pi05_ros.checkpoint import lerobot
from pi05_ros.checkpoint.keys import EMBEDDING, EXPERT_LM_HEAD, LM_HEAD
from pi05_ros.checkpoint.loader import empty_model
from pi05_ros.checkpoint.small_tokenizer import small_tokenizer
from pi05_ros.checkpoint.statistics import Statistics
from pi05_ros.errors import CheckpointError, ConfigurationError
from pi05_ros.model.config import GemmaConfig, Pi05Config, VisionConfig

SIZES: dict[str, Pi05Config] = {
    "tiny": Pi05Config(
        vlm=GemmaConfig(width=64, depth=2, mlp_dim=160, num_heads=8, num_kv_heads=1, head_dim=16),
        expert=GemmaConfig(width=48, depth=2, mlp_dim=96, num_heads=8, num_kv_heads=1, head_dim=16),
        vision=VisionConfig(48, 2, 4, 80, 14, 224),
        vocab=512,
    ),
    "small": Pi05Config(
        vlm=GemmaConfig(width=512, depth=4, mlp_dim=2048, num_heads=8, num_kv_heads=1, head_dim=64),
        expert=GemmaConfig(width=256, depth=4, mlp_dim=1024, num_heads=8, num_kv_heads=1, head_dim=64),
        vision=VisionConfig(288, 4, 4, 1076, 14, 224),
        vocab=4096,
    ),
    # The real widths, two layers of each.
    "mid": Pi05Config(
        vlm=GemmaConfig(width=2048, depth=2, mlp_dim=16384, num_heads=8, num_kv_heads=1, head_dim=256),
        expert=GemmaConfig(width=1024, depth=2, mlp_dim=4096, num_heads=8, num_kv_heads=1, head_dim=256),
        vision=VisionConfig(1152, 2, 16, 4304, 14, 224),
        vocab=4096,
    ),
    "full": Pi05Config.full(),
}
Kind = Literal["quantile", "mean_std", "identity"]
_LABELS: dict[str, str] = {"quantile": "QUANTILES", "mean_std": "MEAN_STD", "identity": "IDENTITY"}
_MASK_31 = 0x7FFFFFFF


@dataclass(frozen=True)
class RobotSide:
    """What a checkpoint says about the robot it was trained on; the defaults are those of the public base checkpoint.

    ``state_statistics`` and ``action_statistics`` None means a checkpoint without statistics.
    """

    cameras: tuple[str, ...] = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")
    empty_cameras: int = 0
    state_dim: int = 32
    action_dim: int = 32
    executed_steps: int | None = None
    num_steps: int = 10
    normalization: Kind = "quantile"
    state_statistics: Statistics | None = None
    action_statistics: Statistics | None = None
    action_names: tuple[str, ...] | None = None
    relative_actions: bool = False
    relative_exclude: tuple[str, ...] = ("gripper",)
    rename_map: tuple[tuple[str, str], ...] = ()


def random_weight(key: str, shape: Sequence[int], seed: int) -> torch.Tensor:
    """The weight ``key`` (canonical name), float32 [*shape]: normal, scaled by name so that activations stay sane.

    The embedding is tied to the language model's head and drawn under the head's name.
    """
    key = LM_HEAD if key == EMBEDDING else key
    generator = torch.Generator().manual_seed((zlib.crc32(key.encode()) ^ (seed * 0x9E3779B1)) & _MASK_31)
    values = torch.randn(*shape, generator=generator, dtype=torch.float32)
    fan_in = math.prod(shape[1:])
    if key.endswith(".dense.weight"):
        return values * (0.5 / math.sqrt(fan_in))
    if key.endswith(".dense.bias"):
        return values * 0.3
    if (".vision_tower." in key and "layer_norm" in key) or "post_layernorm" in key:
        return values * 0.1 if key.endswith(".bias") else 1 + 0.2 * values
    if key.endswith(("layernorm.weight", "norm.weight")):
        return values * 0.2
    if "lm_head" in key:
        return values * (1 / math.sqrt(fan_in))
    if "position_embedding" in key:
        return values * 0.5
    if key.endswith(".bias"):
        return values * 0.1
    if key.endswith("patch_embedding.weight"):
        return values * (2 / math.sqrt(fan_in))
    if "q_proj" in key or "k_proj" in key:
        return values * (1.8 / math.sqrt(fan_in))
    return values * (1.3 / math.sqrt(fan_in))


def random_statistics(width: int, seed: int, kind: Kind = "quantile") -> Statistics:
    """Plausible statistics, float32 [width]; ``mean_std`` leaves the quantiles out, as older data sets do."""
    generator = np.random.default_rng([seed, width])
    mean = generator.normal(0, 0.3, width).astype(np.float32)
    std = generator.uniform(0.3, 1.0, width).astype(np.float32)
    statistics = Statistics(mean=mean, std=std, min=mean - 3 * std, max=mean + 3 * std)
    if kind == "mean_std":
        return statistics
    return replace(statistics, q01=mean - 2 * std, q99=mean + 2 * std)


def write_lerobot(
    folder: Path,
    config: Pi05Config,
    robot: RobotSide | None = None,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    spelling: Literal["hub", "saved"] = "hub",
    max_shard_bytes: int | None = None,
    tokenizer: bool = True,
) -> Path:
    """Write a LeRobot folder.

    Args:
        spelling: "hub" as the public base file (no prefix, embedding tied away), "saved" as ``save_pretrained``
            writes (``model.`` prefix, both tied tensors).
        max_shard_bytes: split the weights into shards of at most this size, with an index; None writes one file.

    Raises:
        CheckpointError: ``checkpoint.folder_in_use`` for a folder that is not empty.
        ConfigurationError: ``config.checkpoint_plan`` for a tokenizer larger than the vocabulary, or statistics of
            another width than their feature.
    """
    robot = robot or RobotSide()
    _prepare(folder, config, robot, tokenizer)
    _write_json(folder / "config.json", _lerobot_config(config, robot, dtype))
    _write_processors(folder, robot, config.max_token_len)
    _write_weights(folder, _stored(config, seed, spelling), dtype, spelling, max_shard_bytes)
    if tokenizer:
        _write_tokenizer(folder)
    return folder


def write_openpi(
    folder: Path,
    config: Pi05Config,
    robot: RobotSide | None = None,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    assets: Sequence[str] = ("robot",),
    max_shard_bytes: int | None = None,
    tokenizer: bool = True,
    with_config: bool = True,
) -> Path:
    """Write an OpenPI PyTorch folder as its converter does: statistics under each asset id, config.json on request.

    Raises: as `write_lerobot`.
    """
    robot = robot or RobotSide()
    _prepare(folder, config, robot, tokenizer)
    if with_config:
        content = {
            "action_dim": config.action_dim,
            "action_horizon": config.horizon,
            "paligemma_variant": "gemma_2b",
            "action_expert_variant": "gemma_300m",
            "precision": _dtype_name(dtype),
        }
        _write_json(folder / "config.json", content | _architecture(config))
    named = {"state": robot.state_statistics, "actions": robot.action_statistics}
    table = {
        name: {
            array: getattr(statistics, array).tolist()
            for array in statistics.available()
            if array not in ("min", "max")
        }
        for name, statistics in named.items()
        if statistics is not None
    }
    for asset in assets if table else ():
        (folder / "assets" / asset).mkdir(parents=True)
        _write_json(folder / "assets" / asset / "norm_stats.json", {"norm_stats": table})
    _write_weights(folder, _stored(config, seed, "hub"), dtype, "hub", max_shard_bytes)
    if tokenizer:
        _write_tokenizer(folder)
    return folder


def write_builtin(folder: Path) -> Path:
    """The checkpoint that ships with the package: a tiny network for a 6-joint arm with gripper and three cameras."""
    joints = 6
    # A random network's output spreads over several units either side of zero, where a trained one keeps to [-1, 1].
    # Narrow action quantiles keep that within an arm's reach: joints in radians around zero, the gripper in 0..1.
    state_low, state_high = [-1.6] * joints + [0.0], [1.6] * joints + [1.0]
    action_low, action_high = [-0.16] * joints + [0.42], [0.16] * joints + [0.58]
    names = (*(f"joint_{index}" for index in range(1, joints + 1)), "gripper")
    robot = RobotSide(
        state_dim=joints + 1,
        action_dim=joints + 1,
        executed_steps=25,
        state_statistics=_quantiles(state_low, state_high),
        action_statistics=_quantiles(action_low, action_high),
        action_names=names,
    )
    return write_lerobot(folder, SIZES["tiny"], robot, dtype=torch.bfloat16)


def _quantiles(low: Sequence[float], high: Sequence[float]) -> Statistics:
    q01, q99 = np.asarray(low, np.float32), np.asarray(high, np.float32)
    mean, std = (q01 + q99) / 2, (q99 - q01) / 4
    return Statistics(mean=mean, std=std, q01=q01, q99=q99, min=q01, max=q99)


def _prepare(folder: Path, config: Pi05Config, robot: RobotSide, tokenizer: bool) -> None:
    for label, statistics, width in (
        ("state", robot.state_statistics, robot.state_dim),
        ("action", robot.action_statistics, robot.action_dim),
    ):
        if statistics is not None and statistics.width != width:
            raise ConfigurationError(
                "checkpoint_plan", f"{label} statistics are {statistics.width} wide, the {label} is {width}"
            )
    if max(robot.state_dim, robot.action_dim) > config.action_dim:
        raise ConfigurationError(
            "checkpoint_plan",
            f"state {robot.state_dim} and action {robot.action_dim} must fit the padded width {config.action_dim}",
        )
    if tokenizer and config.vocab < small_tokenizer().get_vocab_size():
        raise ConfigurationError(
            "checkpoint_plan", f"the tokenizer needs a vocabulary of 512, the network has {config.vocab}; leave it out"
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError("folder_in_use", f"{folder} exists and is not an empty folder; choose another")
    folder.mkdir(parents=True, exist_ok=True)


def stored_shapes(config: Pi05Config, spelling: Literal["hub", "saved"]) -> dict[str, tuple[int, ...]]:
    """Canonical name -> shape of everything a file of this spelling holds, heads included."""
    shapes = {key: tuple(value.shape) for key, value in empty_model(config).state_dict().items()}
    shapes[LM_HEAD] = shapes[EMBEDDING]
    shapes[EXPERT_LM_HEAD] = (config.vocab, config.expert.width)
    if spelling == "hub":
        del shapes[EMBEDDING]
    return dict(sorted(shapes.items()))


def _stored(config: Pi05Config, seed: int, spelling: Literal["hub", "saved"]) -> Iterator[tuple[str, torch.Tensor]]:
    for key, shape in stored_shapes(config, spelling).items():
        yield key, random_weight(key, shape, seed)


def _write_weights(
    folder: Path,
    weights: Iterator[tuple[str, torch.Tensor]],
    dtype: torch.dtype,
    spelling: Literal["hub", "saved"],
    max_shard_bytes: int | None,
) -> None:
    """One shard at a time, so that memory does not grow with the model where it is sharded."""
    prefix = "model." if spelling == "saved" else ""
    shards: list[list[str]] = []
    shard: dict[str, torch.Tensor] = {}
    total = held = 0
    # One entry at most: the library writes several in no fixed order, and then equal folders would differ in bytes.
    metadata = {EMBEDDING: LM_HEAD} if spelling == "hub" else {"format": "pt"}

    def flush() -> None:
        nonlocal shard, held
        file = folder / f"shard-{len(shards)}.safetensors"
        with _ordinary_mode(file):
            save_file(shard, file, metadata=metadata)
        shards.append(list(shard))
        shard, held = {}, 0

    for key, value in weights:
        tensor = value.to(dtype)
        size = tensor.numel() * tensor.element_size()
        if max_shard_bytes is not None and shard and held + size > max_shard_bytes:
            flush()
        shard[prefix + key] = tensor
        held += size
        total += size
    flush()
    if max_shard_bytes is None:
        (folder / "shard-0.safetensors").rename(folder / "model.safetensors")
        return
    names = [f"model-{index + 1:05d}-of-{len(shards):05d}.safetensors" for index in range(len(shards))]
    for index, name in enumerate(names):
        (folder / f"shard-{index}.safetensors").rename(folder / name)
    weight_map = {key: name for keys, name in zip(shards, names, strict=True) for key in keys}
    _write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})


def _lerobot_config(config: Pi05Config, robot: RobotSide, dtype: torch.dtype) -> dict[str, Any]:
    size = config.vision.image_size
    return {
        "type": "pi05",
        "n_obs_steps": 1,
        "input_features": _input_features(robot, size),
        "output_features": _action_feature(robot),
        "device": "cpu",
        "paligemma_variant": "gemma_2b",
        "action_expert_variant": "gemma_300m",
        "dtype": _dtype_name(dtype),
        "chunk_size": config.horizon,
        "n_action_steps": config.horizon if robot.executed_steps is None else robot.executed_steps,
        "max_state_dim": config.action_dim,
        "max_action_dim": config.action_dim,
        "num_inference_steps": robot.num_steps,
        "min_period": config.min_period,
        "max_period": config.max_period,
        "use_relative_actions": robot.relative_actions,
        "relative_exclude_joints": list(robot.relative_exclude),
        "action_feature_names": None if robot.action_names is None else list(robot.action_names),
        "rtc_config": None,
        "image_resolution": [size, size],
        "empty_cameras": robot.empty_cameras,
        "tokenizer_max_length": config.max_token_len,
        "normalization_mapping": _norm_map(robot),
    } | _architecture(config)


def _architecture(config: Pi05Config) -> dict[str, Any]:
    """Published folders have no such block and are of full size."""
    full = Pi05Config.full()
    if (config.vlm, config.expert, config.vision, config.vocab) == (full.vlm, full.expert, full.vision, full.vocab):
        return {}
    block: dict[str, Any] = {name: asdict(getattr(config, name)) for name in ("vlm", "expert", "vision")}
    return {"architecture": block | {"vocab": config.vocab}}


def _input_features(robot: RobotSide, size: int) -> dict[str, Any]:
    cameras = [*robot.cameras, *(f"empty_camera_{index}" for index in range(robot.empty_cameras))]
    images = {lerobot.IMAGES + name: {"type": "VISUAL", "shape": [3, size, size]} for name in cameras}
    return images | {lerobot.STATE: {"type": "STATE", "shape": [robot.state_dim]}}


def _action_feature(robot: RobotSide) -> dict[str, Any]:
    return {lerobot.ACTION: {"type": "ACTION", "shape": [robot.action_dim]}}


def _norm_map(robot: RobotSide) -> dict[str, str]:
    label = _LABELS[robot.normalization]
    return {"VISUAL": "IDENTITY", "STATE": label, "ACTION": label}


def _write_processors(folder: Path, robot: RobotSide, max_token_len: int) -> None:
    arrays = {
        f"{feature}.{name}": getattr(statistics, name)
        for feature, statistics in ((lerobot.STATE, robot.state_statistics), (lerobot.ACTION, robot.action_statistics))
        if statistics is not None
        for name in statistics.available()
    }
    names = None if robot.action_names is None else list(robot.action_names)
    features = {lerobot.IMAGES + name: {"type": "VISUAL", "shape": [3, 224, 224]} for name in robot.cameras}
    features |= {lerobot.STATE: {"type": "STATE", "shape": [robot.state_dim]}} | _action_feature(robot)
    before: list[dict[str, Any]] = [
        _step("rename_observations_processor", rename_map=dict(robot.rename_map)),
        _step("to_batch_processor"),
        _step(
            "relative_actions_processor",
            enabled=robot.relative_actions,
            exclude_joints=list(robot.relative_exclude),
            action_names=names,
        ),
        _step("normalizer_processor", eps=1e-8, features=features, norm_map=_norm_map(robot)),
        _step("pi05_prepare_state_tokenizer_processor_step"),
        _step(
            "tokenizer_processor",
            max_length=max_token_len,
            task_key="task",
            padding_side="right",
            padding="max_length",
            truncation=True,
            tokenizer_name="google/paligemma-3b-pt-224",
        ),
        _step("device_processor", device="cpu", float_dtype=None),
    ]
    after: list[dict[str, Any]] = [
        _step("unnormalizer_processor", eps=1e-8, features=_action_feature(robot), norm_map=_norm_map(robot)),
        _step("absolute_actions_processor", enabled=robot.relative_actions),
        _step("device_processor", device="cpu", float_dtype=None),
    ]
    for pipeline, steps, index in (("policy_preprocessor", before, 3), ("policy_postprocessor", after, 0)):
        if arrays:
            file = f"{pipeline}_step_{index}_{steps[index]['registry_name']}.safetensors"
            with _ordinary_mode(folder / file):
                save_arrays(arrays, folder / file)
            steps[index]["state_file"] = file
        _write_json(folder / f"{pipeline}.json", {"name": pipeline, "steps": steps})


def _step(registry_name: str, **config: Any) -> dict[str, Any]:
    return {"registry_name": registry_name, "config": config}


@contextmanager
def _ordinary_mode(file: Path) -> Iterator[None]:
    """safetensors writes for the owner alone; a checkpoint is read by whoever may read its other files."""
    file.touch()
    mode = file.stat().st_mode
    yield
    file.chmod(mode)


def _write_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text(small_tokenizer().to_str(pretty=True) + "\n", encoding="utf-8")


def _write_json(file: Path, content: Any) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
