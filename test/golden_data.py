"""The golden data of test/golden: tensors of the reference implementations, and the small model they were made with."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor

from pi05_ros.checkpoint.formats import open_checkpoint
from pi05_ros.checkpoint.loader import load_model
from pi05_ros.model.config import Pi05Config
from pi05_ros.model.pi05 import Pi05

GOLDEN = Path(__file__).parent / "golden"
HUB_STYLE_TINY = GOLDEN / "hub_style_tiny"


class Case(NamedTuple):
    """One golden case: what goes into ``Pi05.sample_actions``, and every tensor the reference had on the way."""

    name: str
    peer: str
    images: list[Tensor]
    image_masks: list[Tensor]
    tokens: Tensor
    token_mask: Tensor
    noise: Tensor
    num_steps: int
    tensors: dict[str, Tensor]


@functools.cache
def read_json(name: str) -> Any:
    return json.loads((GOLDEN / name).read_text(encoding="utf-8"))


@functools.cache
def tensors(name: str) -> dict[str, Tensor]:
    return load_file(GOLDEN / f"{name}.safetensors")


def case(name: str) -> Case:
    """The golden case ``case_<name>``; ``b4``'s images are not among the inputs and come from ``b4_images``."""
    described, inputs = read_json("cases.json")[name], tensors("inputs")
    if name == "b4":
        images = b4_images()
        masks = list(inputs["b4.image_masks"])
    else:
        images = [
            inputs[image] if image in inputs else torch.full_like(inputs["b1.image.cam0"], -1.0)
            for image in described["images"]
        ]
        masks = [torch.tensor([bool(mask)]) for mask in described["image_masks"]]
    return Case(
        name,
        described["peer"],
        images,
        masks,
        inputs[described["tokens"]],
        inputs[described["token_mask"]],
        inputs[described["noise"]],
        described["num_steps"],
        tensors(f"case_{name}"),
    )


def b4_images() -> list[Tensor]:
    """LeRobot's resize of the raw frames, as the reference had them."""
    from pi05_ros.transforms.images import resize_with_pad

    raw = tensors("inputs")
    return [
        torch.stack([resize_with_pad(frame.numpy(), 224, "torch") for frame in raw[f"b4.raw.cam{camera}"]])
        for camera in range(3)
    ]


def config(size: str) -> Pi05Config:
    """TINY, SMALL, MID or FULL of sizes.json."""
    described = read_json("sizes.json")[size]
    return Pi05Config.from_architecture({key: described[key] for key in ("vlm", "expert", "vision", "vocab")})


@functools.cache
def tiny_model() -> Pi05:
    """The network of the golden cases, float32 on the CPU, loaded by the real loader; not to be changed."""
    return load_model(open_checkpoint(HUB_STYLE_TINY), "cpu", torch.float32)
