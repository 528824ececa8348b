"""Small checkpoint folders for tests, and ways to spoil them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from pi05_ros.checkpoint.make import SIZES, RobotSide, random_statistics, write_lerobot, write_openpi

GOLDEN = Path(__file__).parent / "golden"
TINY = SIZES["tiny"]
LIBERO = RobotSide(
    cameras=("image", "image2"),
    empty_cameras=1,
    state_dim=8,
    action_dim=7,
    executed_steps=10,
    state_statistics=random_statistics(8, 1),
    action_statistics=random_statistics(7, 2),
)


def libero_folder(folder: Path, **options: Any) -> Path:
    """LIBERO at tiny size: image, image2, one empty camera, 8 in, 7 out, quantile statistics."""
    return write_lerobot(folder, TINY, LIBERO, **({"tokenizer": False} | options))


def openpi_folder(folder: Path, **options: Any) -> Path:
    """OpenPI at tiny size with statistics of 8 and 7 dimensions."""
    return write_openpi(folder, TINY, LIBERO, **({"tokenizer": False} | options))


def copy(folder: Path, to: Path) -> Path:
    shutil.copytree(folder, to)
    return to


def edit_json(file: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    file = folder / "model.safetensors"
    weights = load_file(file)
    changed = change(weights)
    save_file(changed if isinstance(changed, dict) else weights, file)


def pipeline_step(folder: Path, pipeline: str, name: str, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change one step of a processor file."""
    edit_json(
        folder / f"policy_{pipeline}.json",
        lambda content: [change(step) for step in content["steps"] if step["registry_name"] == name],
    )
