"""What the engine is asked and what it answers."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
import torch

from pi05_ros.engine.chunking import RealTimeChunking
from pi05_ros.errors import ObservationError
from pi05_ros.model.config import Pi05Config

Switch = bool | Literal["auto"]
MAX_STEPS = 1000


@dataclass(frozen=True)
class ModelInputs:
    """One observation in the model's terms.

    Attributes:
        images: per camera, in the order the prefix takes them: float32 [3, S, S] in [-1, 1].
        image_masks: per camera: False where the camera is absent.
        tokens: int64 [T]; token_mask: bool [T], valid tokens first.
    """

    images: tuple[torch.Tensor, ...]
    image_masks: tuple[bool, ...]
    tokens: torch.Tensor
    token_mask: torch.Tensor


@dataclass(frozen=True)
class InferenceOptions:
    """How one request wants to be computed.

    Attributes:
        noise: initial noise, float32 [H, D] or [1, H, D]; drawn from ``seed`` where not given.
        seed: unsigned 64-bit seed; drawn from the operating system where neither noise nor seed is given.
        num_steps: Euler steps; the checkpoint's number where not given.
        horizon: rows to compute, at most the checkpoint's; all of them where not given.
        rtc: what of the last chunk is still to be executed, and how the new one shall continue it.
        prefix_cache: whether this request may use the engine's prefix cache, where it has one.
        cuda_graph: ``auto`` replays a graph where one is captured; True captures it now; False computes eagerly.
    """

    noise: np.ndarray | None = None
    seed: int | None = None
    num_steps: int | None = None
    horizon: int | None = None
    rtc: RealTimeChunking | None = None
    prefix_cache: Switch = "auto"
    cuda_graph: Switch = "auto"


@dataclass(frozen=True)
class EngineResult:
    """The answer to one request: ``actions`` float32 [H, D] on the CPU, still normalised.

    Attributes:
        timings_ms: ``prefix`` and ``action_denoise``.
        cache_hit: the prefix came from the cache. graph: a CUDA graph was replayed.
    """

    actions: torch.Tensor
    num_steps: int
    noise_seed: int | None
    timings_ms: dict[str, float] = field(default_factory=dict)
    cache_hit: bool = False
    graph: bool = False


class Request(NamedTuple):
    """Checked options: ``noise`` float32 [H, D] on the CPU, everything else decided."""

    noise: torch.Tensor
    seed: int | None
    num_steps: int
    rtc: RealTimeChunking | None
    prefix_cache: Switch
    cuda_graph: Switch

    @property
    def horizon(self) -> int:
        return int(self.noise.shape[0])

    @property
    def mode(self) -> str:
        return "off" if self.rtc is None else self.rtc.mode


def check_options(options: InferenceOptions, config: Pi05Config, num_steps: int) -> Request:
    """Check what a request wants and draw its noise.

    Noise is drawn by a CPU generator whatever the device, so that a seed means the same everywhere.

    Raises:
        ObservationError: ``observation.noise``, ``.seed``, ``.num_steps``, ``.horizon`` or ``.rtc``.
    """
    steps = _whole("num_steps", options.num_steps, num_steps, MAX_STEPS)
    horizon = _whole("horizon", options.horizon, config.horizon, config.horizon)
    for name in ("prefix_cache", "cuda_graph"):
        if getattr(options, name) not in (True, False, "auto"):
            raise ObservationError(name, f"{name}: true, false or auto expected, got {getattr(options, name)!r}")
    rtc = options.rtc
    if rtc is not None:
        rtc.check(horizon, config.action_dim)
        rtc = rtc if rtc.binds else None
    noise, seed = _noise(options, (horizon, config.action_dim))
    return Request(noise, seed, steps, rtc, options.prefix_cache, options.cuda_graph)


def _whole(name: str, value: int | None, default: int, most: int) -> int:
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise ObservationError(name, f"{name}: a whole number from 1 to {most} expected, got {value!r}")
    return value


def _noise(options: InferenceOptions, shape: tuple[int, int]) -> tuple[torch.Tensor, int | None]:
    if options.noise is not None:
        given = np.asarray(options.noise)
        if given.shape not in (shape, (1, *shape)) or given.dtype.kind not in "fiu":
            raise ObservationError(
                "noise", f"noise: numbers of shape {list(shape)} expected, got {given.dtype} {list(given.shape)}"
            )
        noise = torch.from_numpy(np.array(given, dtype=np.float32).reshape(shape))
        if not bool(torch.isfinite(noise).all()):
            raise ObservationError("noise", "noise: finite numbers expected, got nan or inf")
        return noise, None
    seed = secrets.randbits(64) if options.seed is None else options.seed
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**64:
        raise ObservationError("seed", f"seed: a whole number in [0, 2**64) expected, got {seed!r}")
    return torch.randn(shape, generator=torch.Generator("cpu").manual_seed(seed)), seed
