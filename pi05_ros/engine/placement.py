"""Where weights live: on the device, or in host memory and on the device only while they are needed.

Nothing is computed elsewhere or otherwise, so every placement gives the same actions; only time and memory differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from pi05_ros.model.pi05 import Pi05

Residence = Literal["resident", "stage", "layer"]
Stage = Literal["vision", "language", "expert", "modulation"]
STAGES: tuple[Stage, ...] = ("vision", "language", "expert", "modulation")
_ALIGNMENT = 256


@dataclass(frozen=True)
class Placement:
    """How each part of the network is kept.

    ``resident`` stays on the device; ``stage`` comes when its stage begins and goes when it ends; ``layer`` passes
    through two buffers, one layer computing while the next one is copied.

    Attributes:
        vision: SigLIP. language: PaliGemma's layers. expert: the action expert's layers; unless it is resident, the
            matrices of its adaptive norms come only while a modulation table is computed.
        language_layers: how many of the last language layers ``language`` speaks of; the others are resident.
        token_embedding: ``host`` looks tokens up in host memory and copies only the rows.
        empty_cache: give memory that a stage leaves back to the driver.
    """

    vision: Residence = "resident"
    language: Residence = "resident"
    expert: Residence = "resident"
    language_layers: int | None = None
    token_embedding: Literal["resident", "host"] = "resident"
    empty_cache: bool = False

    @property
    def all_resident(self) -> bool:
        """Whether no weight ever moves; only then can work be captured in a graph."""
        return self.token_embedding == "resident" and all(self.residence(stage) == "resident" for stage in STAGES)

    def residence(self, stage: Stage) -> Residence:
        """How a stage's weights are kept."""
        if stage == "modulation":
            return "resident" if self.expert == "resident" else "stage"
        residence: Residence = getattr(self, stage)
        return residence

    def __str__(self) -> str:
        if self.all_resident:
            return "resident"
        named: tuple[Stage, ...] = ("vision", "language", "expert")
        parts = [f"{name} {self.residence(name)}" for name in named if self.residence(name) != "resident"]
        if self.language_layers is not None and self.language != "resident":
            parts.append(f"last {self.language_layers} language layers")
        return ", ".join([*parts, *(["token embedding host"] if self.token_embedding == "host" else [])])


class HostUnit:
    """The parameters of some modules, in one block of host memory (pinned where there is CUDA).

    Between `bring` and `drop` the modules' parameters are views into a block on the device; otherwise they are on
    torch's meta device, where using them fails.
    """

    def __init__(self, modules: Sequence[nn.Module], device: torch.device) -> None:
        self._device = device
        self._slots: list[tuple[nn.Module, str, torch.dtype, torch.Size, int, int]] = []
        parameters = [
            (module, name, parameter)
            for root in modules
            for module in root.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None
        ]
        offset = 0
        for module, name, parameter in parameters:
            size = parameter.numel() * parameter.element_size()
            self._slots.append((module, name, parameter.dtype, parameter.shape, offset, size))
            offset += -(-size // _ALIGNMENT) * _ALIGNMENT
        self.bytes = offset
        self._host = torch.empty(offset, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        self._set(self._host)
        for module, name, parameter in parameters:
            cast(Tensor, module._parameters[name]).copy_(parameter)
        self.drop()

    def bring(self, block: Tensor | None = None) -> Tensor:
        """Start copying to the device, into ``block`` (uint8, at least ``bytes`` long) or a new one."""
        if block is None:
            block = torch.empty(self.bytes, dtype=torch.uint8, device=self._device)
        block[: self.bytes].copy_(self._host, non_blocking=True)
        self._set(block)
        return block

    def drop(self) -> None:
        """Take the parameters off the device; the host keeps them."""
        for module, name, dtype, shape, _, _ in self._slots:
            module._parameters[name] = _parameter(torch.empty(shape, dtype=dtype, device="meta"))

    def _set(self, block: Tensor) -> None:
        for module, name, dtype, shape, offset, size in self._slots:
            module._parameters[name] = _parameter(block[offset : offset + size].view(dtype).view(shape))


def _parameter(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


class LayerStream:
    """Brings layers one after the other, the next one while the last one computes, through two blocks.

    Args:
        layers: each layer and those of its modules that travel.
    """

    def __init__(self, layers: Sequence[tuple[nn.Module, list[nn.Module]]], device: torch.device) -> None:
        self.units = [HostUnit(modules, device) for _, modules in layers]
        self._device = device
        self._blocks: list[Tensor] = []
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._copied: list[Any] = [None] * len(self.units)
        self._free: list[Any] = [None, None]
        self._coming: int | None = None
        self._turn = 0
        for index, (layer, _) in enumerate(layers):
            layer.register_forward_pre_hook(lambda _, __, index=index: self._enter(index))
            layer.register_forward_hook(lambda _, __, ___, index=index: self._leave(index))

    @property
    def block_bytes(self) -> int:
        return 2 * max(unit.bytes for unit in self.units)

    def begin(self) -> None:
        size = max(unit.bytes for unit in self.units)
        self._blocks = [torch.empty(size, dtype=torch.uint8, device=self._device) for _ in range(2)]
        self._free = [None, None]
        self._turn = 0
        self._fetch(0)

    def end(self) -> None:
        """Also after an exception, wherever it came."""
        if self._copies is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._copies)
        for unit in self.units:
            unit.drop()
        self._blocks, self._coming = [], None

    def _fetch(self, index: int) -> None:
        place = self._turn % 2
        self._turn += 1
        if self._copies is None:
            self.units[index].bring(self._blocks[place])
        else:
            if self._free[place] is None:
                self._copies.wait_stream(torch.cuda.current_stream(self._device))
            else:
                self._copies.wait_event(self._free[place])
            with torch.cuda.stream(self._copies):
                self.units[index].bring(self._blocks[place])
                self._copied[index] = self._copies.record_event()
        self._coming = index

    def _enter(self, index: int) -> None:
        if self._coming != index:
            self._fetch(index)
        if self._copies is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied[index])
        if len(self.units) > 1:
            self._fetch((index + 1) % len(self.units))

    def _leave(self, index: int) -> None:
        if len(self.units) == 1:
            return
        if self._copies is not None:
            # _enter(index) has turned twice since this layer's block was chosen.
            self._free[self._turn % 2] = torch.cuda.current_stream(self._device).record_event()
        self.units[index].drop()


class HostEmbedding(nn.Module):
    """Token embedding in host memory; only the rows that are looked up travel."""

    def __init__(self, weight: Tensor, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._weight = torch.empty(weight.shape, dtype=weight.dtype, pin_memory=torch.cuda.is_available())
        self._weight.copy_(weight)

    def forward(self, tokens: Tensor) -> Tensor:
        return functional.embedding(tokens.cpu(), self._weight).to(self._device)


class WeightPlacement:
    """A network whose weights are placed; see `Placement`. ``device_bytes`` and ``peak_bytes`` count weights only."""

    def __init__(self, model: Pi05, placement: Placement, device: torch.device) -> None:
        self.placement = placement
        self._device = device
        self._units: dict[Stage, list[HostUnit]] = {stage: [] for stage in STAGES}
        self._streams: dict[Stage, LayerStream] = {}
        self._open: list[Stage] = []
        language = model.prefix.blocks
        if placement.language_layers is not None:
            language = language[max(0, len(language) - placement.language_layers) :]
        vision, expert = model.vision.vision_model, model.expert
        norms = [norm for layer in expert.blocks for norm in (layer.input_layernorm, layer.post_attention_layernorm)]
        layers: dict[Stage, list[tuple[nn.Module, list[nn.Module]]]] = {
            "vision": [(layer, [layer]) for layer in vision.blocks],
            "language": [(layer, [layer]) for layer in language],
            "expert": [(layer, [layer.self_attn, layer.mlp]) for layer in expert.blocks],
            "modulation": [],
        }
        others: dict[Stage, list[nn.Module]] = {
            "vision": [vision.embeddings, vision.post_layernorm, model.projector],
            "modulation": [*norms, expert.norm],
        }
        with torch.no_grad():
            for stage in STAGES:
                residence = placement.residence(stage)
                whole = [one for _, modules in layers[stage] for one in modules] + others.get(stage, [])
                if residence == "stage" and whole:
                    self._units[stage] = [HostUnit(whole, device)]
                elif residence == "layer" and layers[stage]:
                    self._streams[stage] = LayerStream(layers[stage], device)
            if placement.token_embedding == "host":
                model.prefix.embed_tokens = HostEmbedding(model.prefix.embed_tokens.weight, device)  # type: ignore[assignment]
            for module in model.modules():
                for name, parameter in module._parameters.items():
                    if parameter is not None and parameter.device.type != "meta" and parameter.device != device:
                        module._parameters[name] = _parameter(parameter.to(device))
        resident = {id(one): one for one in model.parameters() if one.device.type != "meta"}
        self.device_bytes = sum(one.numel() * one.element_size() for one in resident.values())
        self.peak_bytes = self.device_bytes

    @contextmanager
    def stage(self, stage: Stage) -> Iterator[None]:
        """Weights of a stage are on the device inside; whatever happens there, they are off it afterwards."""
        units, stream = self._units[stage], self._streams.get(stage)
        if not units and stream is None:
            yield
            return
        moving = sum(unit.bytes for unit in units) + (stream.block_bytes if stream else 0)
        self.device_bytes += moving
        self.peak_bytes = max(self.peak_bytes, self.device_bytes)
        try:
            for unit in units:
                unit.bring()
            if stream is not None:
                stream.begin()
            yield
        finally:
            for unit in units:
                unit.drop()
            if stream is not None:
                stream.end()
            self.device_bytes -= moving
            if self.placement.empty_cache and self._device.type == "cuda":
                torch.cuda.empty_cache()
