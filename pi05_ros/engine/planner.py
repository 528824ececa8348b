"""Which placement fits a memory budget at the least cost, told before the first byte is loaded."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from pi05_ros.checkpoint.loader import empty_model
from pi05_ros.engine.placement import STAGES, Placement, Stage
from pi05_ros.engine.settings import EngineSettings
from pi05_ros.errors import EngineError
from pi05_ros.model.config import Pi05Config
from pi05_ros.model.precision import is_float32_parameter

_LOG = logging.getLogger(__name__)
GIB = 2**30
# Driver context, cuBLAS workspaces and what the allocator cannot use; read off an idle process on recent GPUs.
OVERHEAD_BYTES = int(0.75 * GIB)
# Pinned copies over PCIe 4.0 x16 in practice; only the order of the choices depends on it.
COPY_BYTES_PER_S = 22e9


@dataclass(frozen=True)
class Parts:
    """Bytes of weights by part; ``layer`` is the largest single layer of each stage."""

    stages: dict[Stage, int]
    layer: dict[Stage, int]
    layers: dict[Stage, int]
    token_embedding: int
    other: int


@dataclass(frozen=True)
class Prediction:
    """What a placement will need on the device, bytes, and the copies of one request."""

    placement: Placement
    weights: int
    moving: int
    buffers: int
    copied: int

    @property
    def peak(self) -> int:
        return self.weights + self.moving + self.buffers + OVERHEAD_BYTES

    def __str__(self) -> str:
        return (
            f"{self.placement}: {self.peak / GIB:.2f} GiB at its peak (weights {self.weights / GIB:.2f}, passing "
            f"{self.moving / GIB:.2f}, buffers {self.buffers / GIB:.2f}, overhead {OVERHEAD_BYTES / GIB:.2f}), "
            f"{self.copied / 1e9:.2f} GB copied per request (about {self.copied / COPY_BYTES_PER_S * 1e3:.0f} ms)"
        )


def measure_parts(config: Pi05Config, dtype: torch.dtype) -> Parts:
    """Weights by part, from the configuration alone."""
    size = {True: 4, False: torch.empty(0, dtype=dtype).element_size()}
    stages: dict[Stage, int] = dict.fromkeys(STAGES, 0)
    by_layer: dict[Stage, dict[str, int]] = {stage: {} for stage in STAGES}
    embedding = other = 0
    prefixes: dict[str, Stage] = {
        "paligemma_with_expert.paligemma.model.language_model.layers.": "language",
        "paligemma_with_expert.paligemma.model.vision_tower.": "vision",
        "paligemma_with_expert.paligemma.model.multi_modal_projector.": "vision",
        "paligemma_with_expert.gemma_expert.model.layers.": "expert",
    }
    for name, parameter in empty_model(config).named_parameters():
        count = parameter.numel() * size[is_float32_parameter(name)]
        found = next((stage for prefix, stage in prefixes.items() if name.startswith(prefix)), None)
        if "gemma_expert" in name and ".dense." in name:
            found = "modulation"
        if found is None:
            embedding, other = (embedding + count, other) if "embed_tokens" in name else (embedding, other + count)
            continue
        stages[found] += count
        if ".layers." in name and found != "modulation":
            layer = name.split(".layers.")[1].split(".")[0]
            by_layer[found][layer] = by_layer[found].get(layer, 0) + count
    return Parts(
        stages,
        {stage: max(layers.values(), default=0) for stage, layers in by_layer.items()},
        {stage: len(layers) for stage, layers in by_layer.items()},
        embedding,
        other,
    )


def activation_bytes(config: Pi05Config, cameras: int, batch: int) -> int:
    """Upper bound of buffers and intermediate results of a full prompt: keys and values, and the widest layer."""
    length = cameras * config.tokens_per_image + config.max_token_len
    kv = 2 * config.vlm.depth * batch * (length + config.horizon) * config.vlm.num_kv_heads * config.vlm.head_dim * 4
    gated = batch * length * (3 * config.vlm.mlp_dim * 4 + 4 * config.vlm.width * 4)
    vision = (
        batch
        * cameras
        * config.tokens_per_image
        * (2 * config.vision.intermediate_size + 6 * config.vision.hidden_size)
        * 4
    )
    images = batch * cameras * 3 * config.vision.image_size**2 * 4
    return kv + max(gated, vision) + 2 * images


def predict(placement: Placement, parts: Parts, buffers: int, num_steps: int) -> Prediction:
    """Peak and traffic of one placement. Stages follow each other, so only one of them is on the way at a time."""
    resident = parts.other + (parts.token_embedding if placement.token_embedding == "resident" else 0)
    moving = copied = 0
    for stage in STAGES:
        total, layer = parts.stages[stage], parts.layer[stage]
        offloaded = total
        if stage == "language" and placement.language_layers is not None:
            offloaded = min(total, placement.language_layers * layer)
        residence = placement.residence(stage)
        if residence == "resident":
            offloaded = 0
        elif residence == "layer" and stage == "vision":
            offloaded = min(total, layer * parts.layers[stage])
        resident += total - offloaded
        if offloaded:
            moving = max(moving, offloaded if residence == "stage" else 2 * layer)
            rounds = num_steps if stage == "expert" and residence == "layer" else 1
            # Modulation tables are computed once, not at every request.
            copied += 0 if stage == "modulation" else offloaded * rounds
    return Prediction(placement, resident, moving, buffers, copied)


def choices(depth: int) -> list[Placement]:
    """Placements from which the planner chooses."""
    host = Placement(token_embedding="host")
    found = [Placement(), host, replace(host, vision="stage"), replace(host, expert="stage")]
    base = replace(host, vision="stage", expert="stage", empty_cache=True)
    found += [base]
    found += [replace(base, language="stage", language_layers=count) for count in range(2, depth, 2)]
    layered = replace(host, language="layer", vision="layer", empty_cache=True)
    return [*found, replace(host, language="layer", empty_cache=True), layered, replace(layered, expert="stage")]


def plan_placement(
    config: Pi05Config,
    dtype: torch.dtype,
    budget_bytes: int,
    *,
    cameras: int,
    batch: int = 1,
    num_steps: int = 10,
    unified: bool = False,
) -> Prediction:
    """The placement that fits at the least traffic.

    Args:
        budget_bytes: of the device, everything counted.
        unified: host and device share one memory, so that moving weights saves nothing.

    Raises:
        EngineError: ``engine.memory`` where nothing fits, with the smallest need.
    """
    parts = measure_parts(config, dtype)
    buffers = activation_bytes(config, cameras, batch)
    predictions = [
        predict(placement, parts, buffers, num_steps)
        for placement in ([Placement()] if unified else choices(config.vlm.depth))
    ]
    fitting = [one for one in predictions if one.peak <= budget_bytes]
    if not fitting:
        least = min(predictions, key=lambda one: one.peak)
        where = "memory that host and GPU share: moving weights saves nothing" if unified else "device memory"
        raise EngineError(
            "memory",
            f"a budget of {budget_bytes / GIB:.2f} GiB of {where} holds no placement of this network in {dtype}; the "
            f"smallest is {least}. Give more memory, fewer members per pass, or bfloat16",
        )
    return min(fitting, key=lambda one: (one.copied, one.placement.token_embedding == "host", one.peak))


def place_weights(
    settings: EngineSettings,
    config: Pi05Config,
    device: torch.device,
    dtype: torch.dtype,
    *,
    cameras: int,
    num_steps: int,
) -> EngineSettings:
    """The settings with a placement: their own where they have one, else the planner's.

    Raises:
        EngineError: ``engine.memory``, also where a given placement does not fit a given budget.
    """
    budget = device_budget(device, settings.memory_budget_gb)
    if budget is None:
        return settings
    if settings.placement is None:
        chosen = plan_placement(config, dtype, budget[0], cameras=cameras, num_steps=num_steps, unified=budget[1])
    else:
        buffers = activation_bytes(config, cameras, 1)
        chosen = predict(settings.placement, measure_parts(config, dtype), buffers, num_steps)
        if settings.memory_budget_gb is not None and chosen.peak > budget[0]:
            raise EngineError(
                "memory",
                f"a budget of {budget[0] / GIB:.2f} GiB does not hold {chosen}; leave placement out and one is chosen",
            )
    _LOG.info("weights %s", chosen)
    return replace(settings, placement=chosen.placement)


def device_budget(device: torch.device, memory_budget_gb: float | None) -> tuple[int, bool] | None:
    """(bytes, unified memory) that may be used on a device; ``None`` where nothing is to be planned.

    Without a budget: what is free on a GPU now; on a CPU nothing is planned. Where GPU and host share their memory,
    what the system calls available counts, because cameras and the rest of the robot live there too.
    """
    if device.type != "cuda":
        return None if memory_budget_gb is None else (int(memory_budget_gb * GIB), False)
    unified = bool(torch.cuda.get_device_properties(device).is_integrated)
    free = torch.cuda.mem_get_info(device)[0]
    if unified:
        free = min(free, _available_memory())
    return min(free, int(memory_budget_gb * GIB)) if memory_budget_gb is not None else free, unified


def _available_memory() -> int:
    with Path("/proc/meminfo").open(encoding="ascii") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 2**63
