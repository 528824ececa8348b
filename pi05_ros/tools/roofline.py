"""The least time that a request can take: its arithmetic and its memory traffic against what the machine can do."""

from __future__ import annotations

from dataclasses import dataclass

from pi05_ros.engine.plan import PlanKey
from pi05_ros.model.config import GemmaConfig, Pi05Config


@dataclass(frozen=True)
class Stage:
    """One stage: floating-point operations, and bytes that must pass memory at least once."""

    name: str
    flops: float
    bytes: float

    def floor_ms(self, flops_per_s: float, bytes_per_s: float) -> float:
        return max(self.flops / flops_per_s, self.bytes / bytes_per_s) * 1e3


def stages(config: Pi05Config, key: PlanKey) -> list[Stage]:
    """Matrix products and weights of each stage of one pass; what is small beside them is left out."""
    width = key.dtype.itemsize
    images, vision = key.observations * key.cameras, config.vision
    patches = config.tokens_per_image
    per_layer = 4 * vision.hidden_size**2 + 2 * vision.hidden_size * vision.intermediate_size
    weights = vision.num_hidden_layers * per_layer + vision.hidden_size * config.vlm.width
    mixing = 4 * patches**2 * vision.hidden_size * vision.num_hidden_layers
    siglip = Stage("siglip", images * (2 * patches * weights + mixing), weights * width)

    length = key.cameras * patches + key.prompt
    depth = config.vlm.depth - 1  # the last layer gives keys and values only
    prefix = _gemma("prefix", config.vlm, depth, key.observations, length, length, width)

    members = key.observations * key.candidates
    step = _gemma("expert", config.expert, config.expert.depth, members, key.horizon, length + key.horizon, width)
    kept = members * config.vlm.depth * 2 * length * config.vlm.num_kv_heads * config.vlm.head_dim * width
    expert = Stage("expert", key.num_steps * step.flops, key.num_steps * (step.bytes + kept))
    return [siglip, prefix, expert]


def _gemma(name: str, config: GemmaConfig, depth: int, batch: int, length: int, seen: int, width: int) -> Stage:
    heads = (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    weights = depth * config.width * (heads + 3 * config.mlp_dim)
    mixing = 4 * length * seen * config.num_heads * config.head_dim * depth
    return Stage(name, batch * (2 * length * weights + mixing), weights * width)
