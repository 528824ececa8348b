"""Runs the network: requests in, normalised action chunks out. Knows neither robots nor doors."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from pi05_ros.errors import EngineError, ObservationError
from pi05_ros.model.pi05 import Pi05


@dataclass(frozen=True)
class ModelInputs:
    """One observation in the model's terms.

    Attributes:
        images: per camera, in the order the prefix takes them: float32 [3, S, S] in [-1, 1].
        image_masks: per camera: False where the camera is absent.
        tokens: int64 [T]; token_mask: bool [T].
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
    """

    noise: np.ndarray | None = None
    seed: int | None = None
    num_steps: int | None = None


@dataclass(frozen=True)
class EngineResult:
    """The answer to one request: ``actions`` float32 [H, D] on the CPU, still normalised."""

    actions: torch.Tensor
    num_steps: int
    noise_seed: int | None
    timings_ms: dict[str, float] = field(default_factory=dict)
    cache_hit: bool = False


class Engine:
    """Runs a network. Not thread-safe: one thread calls it."""

    def __init__(self, model: Pi05, num_steps: int) -> None:
        self.model = model
        self.num_steps = num_steps
        self.device = next(model.parameters()).device

    def resolve_noise(self, options: InferenceOptions) -> tuple[torch.Tensor, int | None]:
        """The initial noise float32 [H, D] on the CPU, and the seed it was drawn from.

        Noise is drawn by a CPU generator whatever the device, so that a seed means the same everywhere.

        Raises:
            ObservationError: ``observation.noise`` or ``observation.seed``.
        """
        shape = (self.model.config.horizon, self.model.config.action_dim)
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

    @torch.inference_mode()
    def run(self, members: Sequence[ModelInputs], options: Sequence[InferenceOptions]) -> list[EngineResult]:
        """Compute a group of requests in one pass.

        All members have the same number of cameras and prompt tokens and ask for the same number of steps.

        Raises:
            EngineError: ``engine.group`` where they do not.
            ObservationError: noise, seed or number of steps are not usable.
        """
        steps = {self.num_steps if one.num_steps is None else one.num_steps for one in options}
        if len(steps) != 1 or len(members) != len(options) or len({len(one.images) for one in members}) != 1:
            raise EngineError("group", f"a group needs equal cameras and steps, got steps {sorted(steps)}")
        (num_steps,) = steps
        if isinstance(num_steps, bool) or not isinstance(num_steps, int) or num_steps < 1:
            raise ObservationError("num_steps", f"num_steps: a whole number of at least 1 expected, got {num_steps!r}")
        noises = [self.resolve_noise(one) for one in options]

        started = time.perf_counter()
        cameras = range(len(members[0].images))
        prefix = self.model.encode_prefix(
            [torch.stack([one.images[camera] for one in members]).to(self.device) for camera in cameras],
            [torch.tensor([one.image_masks[camera] for one in members], device=self.device) for camera in cameras],
            torch.stack([one.tokens for one in members]).to(self.device),
            torch.stack([one.token_mask for one in members]).to(self.device),
        )
        self._synchronize()
        encoded = time.perf_counter()
        noise = torch.stack([noise for noise, _ in noises]).to(self.device)
        actions = self.model.denoise(prefix, noise, num_steps).to("cpu", torch.float32)
        denoised = time.perf_counter()
        timings = {"prefix": (encoded - started) * 1e3, "action_denoise": (denoised - encoded) * 1e3}
        return [
            EngineResult(actions[index].clone(), num_steps, seed, dict(timings))
            for index, (_, seed) in enumerate(noises)
        ]

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
