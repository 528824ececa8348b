"""One shape of request, with every buffer it needs: what a CUDA graph captures and a CPU runs eagerly."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from pi05_ros.engine.modulation import ModulationTables, by_row
from pi05_ros.engine.placement import WeightPlacement
from pi05_ros.engine.requests import ModelInputs, Request
from pi05_ros.model.gemma import KeyValues
from pi05_ros.model.pi05 import Pi05


class PlanKey(NamedTuple):
    """All that decides what is computed; requests with equal keys run the same kernels on the same buffers.

    Attributes:
        observations: prefixes in the pass. candidates: chunks denoised from each.
        cameras: images per observation, those absent from all observations left out.
        prompt: prompt tokens, rounded up to the bucket. masked: whether anything within is masked.
        horizon, action_dim: of the suffix. num_steps: Euler steps. rtc: off, guided or hard_prefix.
        dtype: of the matrix products.
    """

    observations: int
    candidates: int
    cameras: int
    prompt: int
    masked: bool
    horizon: int
    action_dim: int
    num_steps: int
    rtc: str
    dtype: torch.dtype

    def __str__(self) -> str:
        parts = [f"{self.observations} x {self.candidates}", f"{self.cameras} cameras", f"{self.prompt} tokens"]
        parts += [f"horizon {self.horizon}", f"{self.num_steps} steps"]
        parts += [] if self.rtc == "off" else [f"rtc {self.rtc}"]
        return ", ".join(parts)


class _Input:
    """A buffer on the device that is filled from the host, through pinned memory where the device is another."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        self.device = torch.zeros(tuple(shape), dtype=dtype, device=device)
        pinned = torch.cuda.is_available()
        self.host = self.device if device.type == "cpu" else torch.zeros(tuple(shape), dtype=dtype, pin_memory=pinned)

    def send(self) -> None:
        """Start the copy; the host buffer may be filled again once the device has finished the request."""
        if self.host is not self.device:
            self.device.copy_(self.host, non_blocking=True)


class Plan:
    """Buffers and functions of one `PlanKey`. B members = observations x candidates, in this order.

    `load` fills the inputs; `prefix` and `denoise` read and write nothing but the plan's own buffers, so that they can
    be captured; ``actions`` float32 [B, H, D] holds the result until the next request.
    """

    def __init__(self, model: Pi05, key: PlanKey, tables: ModulationTables, placement: WeightPlacement) -> None:
        self.key = key
        self._model = model
        self._placement = placement
        config, device = model.config, model.device
        size, patches = config.vision.image_size, config.tokens_per_image
        self.length = key.cameras * patches + key.prompt
        members = key.observations * key.candidates
        self._images = _Input((key.cameras, key.observations, 3, size, size), torch.float32, device)
        self._tokens = _Input((key.observations, key.prompt), torch.int64, device)
        self._valid = _Input((members, self.length), torch.bool, device)
        self._noise = _Input((members, key.horizon, key.action_dim), torch.float32, device)
        self._inputs = [self._images, self._tokens, self._valid, self._noise]
        if key.rtc != "off":
            self._leftover = _Input((members, key.horizon, key.action_dim), torch.float32, device)
            self._weights = _Input((members, key.horizon, 1), torch.float32, device)
            self._guidance = _Input((key.num_steps, members, 1, 1), torch.float32, device)
            self._inputs += [self._leftover, self._weights, self._guidance]
        self._stores = model.new_stores(members, self.length + key.horizon)
        self.actions = torch.zeros_like(self._noise.device)
        self._times = model.euler_times(key.num_steps)
        self._table = tables.steps(key.num_steps)
        self._end = tables.end() if key.rtc == "hard_prefix" else None
        self.between_stages: Callable[[], None] | None = None

    @property
    def buffer_bytes(self) -> int:
        """Memory that the plan holds on the device."""
        tensors = [one.device for one in self._inputs] + [self.actions]
        tensors += [part for store in self._stores for part in store]
        return sum(one.numel() * one.element_size() for one in tensors)

    def attention(self) -> str:
        """Which of torch's attention kernels the prefix and the suffix get."""
        key, config, store = self.key, self._model.config.vlm, self._stores[0]
        found = []
        for name, rows, seen, keys in (
            ("prefix", self.length, self.length, self._first_candidates()[0].first(self.length)),
            ("suffix", key.horizon, self.length + key.horizon, store),
        ):
            folded = rows * config.num_heads // config.num_kv_heads
            query = keys.key.new_empty(keys.key.shape[0], config.num_kv_heads, folded, config.head_dim)
            mask = query.new_zeros(query.shape[0], 1, 1, seen) if key.masked else None
            choice = torch._fused_sdp_choice(query, keys.key, keys.value, attn_mask=mask)
            found.append(f"{name} {SDPBackend(choice).name.lower()}")
        return "attention: " + ", ".join(found)

    def load(self, observations: Sequence[ModelInputs], requests: Sequence[Request], cameras: Sequence[int]) -> None:
        """Copy a group in.

        Args:
            observations: as many as the key says. requests: one per member.
            cameras: which of the observations' cameras are computed.
        """
        key, patches = self.key, self._model.config.tokens_per_image
        for row, one in enumerate(observations):
            members = slice(row * key.candidates, (row + 1) * key.candidates)
            for index, camera in enumerate(cameras):
                self._images.host[index, row].copy_(one.images[camera])
                self._valid.host[members, index * patches : (index + 1) * patches] = one.image_masks[camera]
            taken = min(key.prompt, one.tokens.shape[0])
            self._tokens.host[row].zero_()
            self._tokens.host[row, :taken].copy_(one.tokens[:taken])
            self._valid.host[members, key.cameras * patches :] = False
            self._valid.host[members, key.cameras * patches :][:, :taken] = one.token_mask[:taken]
        for member, request in enumerate(requests):
            self._noise.host[member].copy_(request.noise)
            if request.rtc is not None:
                self._leftover.host[member].copy_(request.rtc.padded_leftover(key.horizon, key.action_dim))
                self._weights.host[member, :, 0].copy_(request.rtc.row_weights(key.horizon))
                self._guidance.host[:, member, 0, 0].copy_(request.rtc.guidance(self._times))
        for one_input in self._inputs:
            one_input.send()

    def whole(self) -> None:
        """Observation to actions."""
        self.prefix()
        if self.between_stages is not None:
            self.between_stages()
        self.denoise()

    def prefix(self) -> None:
        """Images and prompt to keys and values."""
        model, key = self._model, self.key
        # A GPU fills up with all observations at once. A CPU is full with one, and its larger intermediate results
        # would leave the caches and be mapped anew at every use.
        together = 1 if model.device.type == "cpu" else key.observations
        for start in range(0, key.observations, together):
            rows = slice(start, start + together)
            with self._placement.stage("vision"):
                images = model.embed_cameras(self._images.device[:, rows])
            with self._placement.stage("language"):
                embedded = torch.cat([images, model.embed_tokens(self._tokens.device[rows])], dim=1)
                del images
                stores = [KeyValues(keys[rows], values[rows]) for keys, values in self._first_candidates()]
                valid = self._valid.device[:: key.candidates][rows]
                model.write_prefix(stores, embedded, valid, key.masked)
        if key.candidates > 1:
            for store in self._stores:
                for part in store:
                    of_observation = part.unflatten(0, (key.observations, key.candidates))[..., : self.length, :]
                    of_observation[:, 1:].copy_(of_observation[:, :1].expand_as(of_observation[:, 1:]))

    def denoise(self) -> None:
        """Noise to actions, from the keys and values as they are."""
        model, key = self._model, self.key
        context = model.prefix_context(self._stores, self._valid.device, key.horizon, key.masked)
        step = 1.0 / key.num_steps
        x = self._noise.device
        with self._placement.stage("expert"):
            for index, modulation in enumerate(self._table):
                if self._end is not None:
                    kept = self._weights.device > 0
                    x = torch.where(kept, self._leftover.device, x)
                    modulation = by_row(self._end, modulation, kept)
                velocity = model.velocity(context, x, modulation)
                if key.rtc == "guided":
                    error = (self._leftover.device - (x - self._times[index] * velocity)) * self._weights.device
                    velocity = velocity - self._guidance.device[index] * error
                x = x - step * velocity
            if self._end is not None:
                x = torch.where(self._weights.device > 0, self._leftover.device, x)
        self.actions.copy_(x)

    def scrub(self, prefix: bool) -> None:
        """Make results that are not computed anew recognisable: NaN in the actions, and in the prefix on request."""
        self.actions.fill_(math.nan)
        if prefix:
            for store in self._stores:
                for part in store:
                    part.fill_(math.nan)

    def take_prefix(self, observation: int) -> Tensor:
        """A copy of one observation's keys and values, [depth, 2, kv_heads, P, head_dim]."""
        member = observation * self.key.candidates
        return torch.stack([torch.stack([part[member, :, : self.length] for part in store]) for store in self._stores])

    def put_prefix(self, observation: int, taken: Tensor) -> None:
        """Put back what `take_prefix` took."""
        members = slice(observation * self.key.candidates, (observation + 1) * self.key.candidates)
        for store, layer in zip(self._stores, taken, strict=True):
            for part, values in zip(store, layer, strict=True):
                part[members, :, : self.length] = values

    def _first_candidates(self) -> list[KeyValues]:
        return [KeyValues(*(part[:: self.key.candidates] for part in store)) for store in self._stores]


def prompt_bucket(tokens: int, bucket: int, most: int) -> int:
    """Prompt length that is computed for ``tokens`` valid ones: the next multiple of ``bucket``, at most ``most``."""
    return max(1, min(most, math.ceil(tokens / bucket) * bucket))
