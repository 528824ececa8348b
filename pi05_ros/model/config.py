"""Sizes of the network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from pi05_ros.errors import CheckpointError


@dataclass(frozen=True)
class GemmaConfig:
    """Sizes of one Gemma transformer. Query heads share ``num_kv_heads`` (one in both of Pi0.5's)."""

    width: int
    depth: int
    mlp_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class VisionConfig:
    """Sizes of the SigLIP vision transformer; images are square, patches do not overlap."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    patch_size: int
    image_size: int


@dataclass(frozen=True)
class Pi05Config:
    """Sizes of Pi0.5: PaliGemma (vision and prefix) and the action expert.

    Attributes:
        vlm: the prefix transformer. expert: the action expert; both have equal depth and head sizes.
        vocab: rows of the token embedding.
        action_dim: padded action width D. horizon: rows H of an action chunk. max_token_len: prompt tokens T.
        min_period, max_period: of the sinusoidal time embedding.
    """

    vlm: GemmaConfig
    expert: GemmaConfig
    vision: VisionConfig
    vocab: int
    action_dim: int = 32
    horizon: int = 50
    max_token_len: int = 200
    min_period: float = 4e-3
    max_period: float = 4.0

    def __post_init__(self) -> None:
        for label, section in (("vlm", self.vlm), ("expert", self.expert), ("vision", self.vision), ("", self)):
            for one in fields(section):
                value = getattr(section, one.name)
                if one.type == "int" and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                    name = f"{label}.{one.name}".lstrip(".")
                    self._refuse(f"{name} must be a positive whole number, got {value!r}")
        vision = self.vision
        if vision.hidden_size % vision.num_attention_heads:
            heads = vision.num_attention_heads
            self._refuse(f"vision.hidden_size {vision.hidden_size} does not divide into {heads} heads")
        if vision.image_size // vision.patch_size < 1:
            self._refuse(f"vision.patch_size {vision.patch_size} is larger than image_size {vision.image_size}")
        for name in ("depth", "num_heads", "num_kv_heads", "head_dim"):
            ours, theirs = getattr(self.vlm, name), getattr(self.expert, name)
            if ours != theirs:
                self._refuse(f"vlm.{name} {ours} and expert.{name} {theirs} must be equal: they share keys and values")
        if self.vlm.num_heads % self.vlm.num_kv_heads:
            self._refuse(f"num_heads {self.vlm.num_heads} is no multiple of num_kv_heads {self.vlm.num_kv_heads}")
        if self.vlm.head_dim % 2 or self.expert.width % 2:
            self._refuse("head_dim and expert.width must be even: rotary and time embeddings come in pairs")

    @staticmethod
    def _refuse(reason: str) -> None:
        raise CheckpointError("architecture", f"architecture: {reason}")

    @property
    def tokens_per_image(self) -> int:
        """Patches of one image; pixels right and below of the last whole patch are not seen."""
        return (self.vision.image_size // self.vision.patch_size) ** 2

    @classmethod
    def full(cls) -> Pi05Config:
        """The published size: SigLIP So400m/14, Gemma 2B, Gemma 300M."""
        return cls(
            vlm=GemmaConfig(2048, 18, 16384, 8, 1, 256),
            expert=GemmaConfig(1024, 18, 4096, 8, 1, 256),
            vision=VisionConfig(1152, 27, 16, 4304, 14, 224),
            vocab=257152,
        )

    @classmethod
    def from_architecture(cls, block: Mapping[str, Any], **more: Any) -> Pi05Config:
        """Sizes from a config.json's ``architecture`` block {vlm, expert, vision, vocab}; ``more`` are other fields.

        Raises:
            CheckpointError: ``checkpoint.architecture`` with the key that is missing, unknown or out of range.
        """
        sections: dict[str, type[Any]] = {"vlm": GemmaConfig, "expert": GemmaConfig, "vision": VisionConfig}
        expected = {*sections, "vocab"}
        if set(block) != expected:
            raise CheckpointError(
                "architecture", f"architecture: keys {sorted(expected)} expected, got {sorted(block)}"
            )
        parts: dict[str, Any] = {}
        for name, kind in sections.items():
            names = {one.name for one in fields(kind)}
            if not isinstance(block[name], Mapping) or set(block[name]) != names:
                got = sorted(block[name]) if isinstance(block[name], Mapping) else block[name]
                raise CheckpointError("architecture", f"architecture.{name}: keys {sorted(names)} expected, got {got}")
            parts[name] = kind(**block[name])
        return cls(vocab=block["vocab"], **parts, **more)
