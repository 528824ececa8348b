"""Where the bytes of weights come from: files mapped one tensor at a time, or streamed to a GPU by many readers."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

import torch
from safetensors import safe_open

from pi05_ros.checkpoint.headers import StoredTensor
from pi05_ros.errors import ConfigurationError

STREAMER_VARIABLE = "PI05_ROS_MODEL_STREAMER"
Source = Iterator[tuple[str, torch.Tensor]]


def use_streamer(device: torch.device, wanted: bool | None) -> bool:
    """Whether Run:ai Model Streamer reads the weights: installed, for a GPU, and not switched off.

    Args:
        wanted: by parameter; ``None`` leaves it to the environment variable PI05_ROS_MODEL_STREAMER (default on).

    Raises:
        ConfigurationError: ``config.model_streamer`` where it is asked for by parameter and not installed.
    """
    installed = find_spec("runai_model_streamer") is not None
    if wanted and not installed:
        raise ConfigurationError(
            "model_streamer",
            "the model streamer is asked for and not installed: pip install 'runai-model-streamer>=0.17'",
        )
    if wanted is None:
        said = os.environ.get(STREAMER_VARIABLE, "true").strip().lower()
        if said not in ("true", "1", "on", "false", "0", "off"):
            raise ConfigurationError("model_streamer", f"{STREAMER_VARIABLE}: true or false expected, got {said!r}")
        # To host memory the mapped files are as fast, and need no second copy.
        wanted = said in ("true", "1", "on") and device.type == "cuda"
    return wanted and installed


def mapped(plan: Mapping[str, StoredTensor]) -> Source:
    """(parameter, tensor backed by its file) in the files' order."""
    with ExitStack() as files:
        opened: dict[Path, safe_open] = {}
        for name, stored in plan.items():
            if stored.file not in opened:
                opened[stored.file] = files.enter_context(safe_open(stored.file, framework="pt"))
            yield name, opened[stored.file].get_tensor(stored.key)


def streamed(plan: Mapping[str, StoredTensor], device: torch.device) -> Source:
    """(parameter, tensor on ``device``) in the order of arrival; only the planned tensors are read."""
    from runai_model_streamer import SafetensorsStreamer

    names = {stored.key: name for name, stored in plan.items()}
    with SafetensorsStreamer() as streamer:
        streamer.stream_files(
            list(dict.fromkeys(str(stored.file) for stored in plan.values())),
            device=str(device),
            tensor_names=list(names),
        )
        for key, tensor in streamer.get_tensors():
            yield names[key], tensor
