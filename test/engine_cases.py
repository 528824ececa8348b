"""Engines and requests: on the golden network, and on a random one small enough for many requests."""

from __future__ import annotations

import copy
import functools
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from golden_data import Case, config, tiny_model
from torch import Tensor

from pi05_ros.checkpoint.loader import empty_model
from pi05_ros.checkpoint.make import random_weight
from pi05_ros.engine.capture import PlainCall
from pi05_ros.engine.chunking import RealTimeChunking
from pi05_ros.engine.engine import Engine, EngineResult, InferenceOptions, ModelInputs
from pi05_ros.engine.settings import EngineSettings
from pi05_ros.model.config import Pi05Config
from pi05_ros.model.pi05 import Pi05

ACROSS_PLANS = 2e-5
HORIZON, TOKENS, SIZE = 12, 40, 56


@functools.cache
def small_config() -> Pi05Config:
    """16 patches per camera, horizon 12, 40 prompt tokens; everything else as in the golden network."""
    golden = config("TINY")
    return replace(golden, vision=replace(golden.vision, image_size=SIZE), horizon=HORIZON, max_token_len=TOKENS)


@functools.cache
def small_model() -> Pi05:
    """Random weights, float32; not to be changed."""
    model = empty_model(small_config())
    weights = {name: random_weight(name, tuple(one.shape), 0) for name, one in model.state_dict().items()}
    model.load_state_dict(weights, assign=True)
    return model.eval().requires_grad_(False)


def engine(capture: bool = False, model: Pi05 | None = None, **settings: Any) -> Engine:
    """A new engine on its own copy of the small network; ``capture``: plans are captured, as plain calls."""
    own = copy.deepcopy(small_model() if model is None else model)
    return Engine(own, 10, EngineSettings(**settings), capture=PlainCall() if capture else None)


def golden_engine(**settings: Any) -> Engine:
    return engine(model=tiny_model(), **settings)


def inputs(one: Case, member: int = 0) -> ModelInputs:
    """One member of a golden case."""
    return ModelInputs(
        tuple(image[member] for image in one.images),
        tuple(bool(mask[member]) for mask in one.image_masks),
        one.tokens[member],
        one.token_mask[member],
    )


@functools.cache
def observations() -> list[ModelInputs]:
    """Four observations of three cameras with prompts of different lengths; the third one lacks its last camera."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for valid, masks in ((20, (True,) * 3), (31, (True,) * 3), (25, (True, True, False)), (32, (True,) * 3)):
        images = torch.rand(3, 3, SIZE, SIZE, generator=generator) * 2 - 1
        token_mask = torch.arange(TOKENS) < valid
        tokens = torch.randint(0, small_config().vocab, (TOKENS,), generator=generator) * token_mask
        found.append(ModelInputs(tuple(images), masks, tokens, token_mask))
    return found


def noise(seed: int, horizon: int = HORIZON) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((horizon, 32)).astype(np.float32)


def leftover(seed: int, mode: str = "guided", rows: int = 10, delay: int = 3) -> RealTimeChunking:
    return RealTimeChunking(noise(seed)[:rows] * 0.3, delay, mode)  # type: ignore[arg-type]


def answer(one: Engine, members: list[ModelInputs], **options: Any) -> Tensor:
    """Actions [B, H, D]; member i's noise is of seed i unless given."""
    given = [InferenceOptions(**({"noise": noise(index)} | options)) for index in range(len(members))]
    return torch.stack([result.actions for result in one.run(members, given)])


def run_one(one: Engine, member: ModelInputs, **options: Any) -> EngineResult:
    return one.run([member], [InferenceOptions(**({"noise": noise(0)} | options))])[0]
