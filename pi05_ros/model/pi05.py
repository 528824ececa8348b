"""Pi0.5 (Physical Intelligence, 2025, arXiv:2504.16054): flow matching over action chunks, conditioned on a prefix.

Images and prompt are encoded once (`Pi05.encode_prefix`); the action expert then integrates the velocity field from
noise (t = 1) to actions (t = 0) in equal Euler steps (`Pi05.denoise`), reading the prefix's keys and values every time.
Parameter names are the checkpoints', without the language model heads that a policy never uses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from pi05_ros.errors import ObservationError
from pi05_ros.model.config import Pi05Config
from pi05_ros.model.gemma import ExpertTransformer, KeyValues, Modulation, PrefixTransformer, Rotary, rotary
from pi05_ros.model.siglip import Projector, VisionTower

# Additive mask: finite, so that a row with nothing to attend to averages everything instead of giving NaN, and so large
# that it absorbs any score. The references add -2.38e38 to the same effect, but attention kernels that exponentiate in
# base 2 multiply by log2(e), and that product is beyond float32.
MASKED = -1e30


class PrefixContext(NamedTuple):
    """All that the suffix reads of an encoded prefix. B batch, P prefix tokens, H horizon.

    Attributes:
        stores: per layer, keys and values with room for the suffix behind the prefix.
        suffix_angles: rotary angles of the suffix, which begins at the number of valid prefix tokens.
        suffix_mask: additive [B, 1, 1, P + H], or ``None`` where nothing is masked.
    """

    stores: tuple[KeyValues, ...]
    suffix_angles: Rotary
    suffix_mask: Tensor | None


class StepModulation(NamedTuple):
    """The adaptive norms of one denoise step: per layer (before attention, before MLP), and the final norm's."""

    layers: tuple[tuple[Modulation, Modulation], ...]
    final: Modulation


class PaliGemmaModel(nn.Module):
    def __init__(self, config: Pi05Config) -> None:
        super().__init__()
        self.vision_tower = VisionTower(config.vision)
        self.multi_modal_projector = Projector(config.vision.hidden_size, config.vlm.width)
        self.language_model = PrefixTransformer(config.vlm, config.vocab)


class PaliGemma(nn.Module):
    def __init__(self, config: Pi05Config) -> None:
        super().__init__()
        self.model = PaliGemmaModel(config)


class ActionExpert(nn.Module):
    def __init__(self, config: Pi05Config) -> None:
        super().__init__()
        self.model = ExpertTransformer(config.expert)


class PaliGemmaWithExpert(nn.Module):
    def __init__(self, config: Pi05Config) -> None:
        super().__init__()
        self.paligemma = PaliGemma(config)
        self.gemma_expert = ActionExpert(config)


class Pi05(nn.Module):
    """The whole network. B batch, H horizon, D padded action width, T prompt tokens, S image size, P prefix tokens."""

    def __init__(self, config: Pi05Config) -> None:
        super().__init__()
        self.config = config
        width = config.expert.width
        self.paligemma_with_expert = PaliGemmaWithExpert(config)
        self.action_in_proj = nn.Linear(config.action_dim, width)
        self.action_out_proj = nn.Linear(width, config.action_dim)
        self.time_mlp_in = nn.Linear(width, width)
        self.time_mlp_out = nn.Linear(width, width)

    @property
    def device(self) -> torch.device:
        """Where the network computes."""
        return self.action_in_proj.weight.device

    @property
    def vision(self) -> VisionTower:
        return self.paligemma_with_expert.paligemma.model.vision_tower

    @property
    def projector(self) -> Projector:
        return self.paligemma_with_expert.paligemma.model.multi_modal_projector

    @property
    def prefix(self) -> PrefixTransformer:
        return self.paligemma_with_expert.paligemma.model.language_model

    @property
    def expert(self) -> ExpertTransformer:
        return self.paligemma_with_expert.gemma_expert.model

    def sample_actions(
        self,
        images: Sequence[Tensor],
        image_masks: Sequence[Tensor],
        tokens: Tensor,
        token_mask: Tensor,
        noise: Tensor,
        num_steps: int,
    ) -> Tensor:
        """Action chunks from observations: `encode_prefix`, then `denoise`.

        Returns:
            float32 [B, H, D], normalised.
        """
        prefix = self.encode_prefix(images, image_masks, tokens, token_mask, horizon=noise.shape[1])
        return self.denoise(prefix, noise, num_steps)

    def pack(self) -> None:
        """Replace query, key and value projections by one matrix each, gate and up likewise; layer by layer.

        The same numbers in fewer matrix products. Names then differ from the checkpoints': load first, pack afterwards.
        """
        for blocks in (self.prefix.blocks, self.expert.blocks):
            for layer in blocks:
                layer.self_attn.pack()
                layer.mlp.pack()
        for vision_layer in self.vision.vision_model.blocks:
            vision_layer.self_attn.pack()

    def embed_images(self, images: Sequence[Tensor]) -> Tensor:
        """Per camera [B, 3, S, S] -> image tokens [B, cameras * patches, width], not scaled; one pass for all."""
        return self.embed_cameras(torch.stack(list(images)))

    def embed_cameras(self, images: Tensor) -> Tensor:
        """[cameras, B, 3, S, S] -> image tokens [B, cameras * patches, width]."""
        features = self.projector(self.vision(images.flatten(0, 1)))
        return features.unflatten(0, images.shape[:2]).transpose(0, 1).flatten(1, 2)

    def embed_tokens(self, tokens: Tensor) -> Tensor:
        """int64 [B, T] -> [B, T, width], scaled by sqrt(width)."""
        return self.prefix.embed_tokens(tokens) * math.sqrt(self.config.vlm.width)

    def encode_prefix(
        self,
        images: Sequence[Tensor],
        image_masks: Sequence[Tensor],
        tokens: Tensor,
        token_mask: Tensor,
        horizon: int | None = None,
    ) -> PrefixContext:
        """Encode images and prompt: cameras in the given order, then text, with full attention among what is valid.

        Args:
            images: per camera float32 [B, 3, S, S] in [-1, 1].
            image_masks: per camera bool [B]; False where the camera is absent.
            tokens: int64 [B, T]. token_mask: bool [B, T].
            horizon: rows the suffix will have; the configuration's where not given.

        Raises:
            ObservationError: ``observation.model_input`` where shapes or dtypes are others than these.
        """
        horizon = self.config.horizon if horizon is None else horizon
        if len(images) != len(image_masks) or not images:
            raise ObservationError(
                "model_input",
                f"one mask per image and at least one image expected, got {len(image_masks)} masks for "
                f"{len(images)} images",
            )
        batch, size = images[0].shape[0], self.config.vision.image_size
        for camera, (image, mask) in enumerate(zip(images, image_masks, strict=True)):
            _expect(f"images[{camera}]", image, torch.float32, (batch, 3, size, size))
            _expect(f"image_masks[{camera}]", mask, torch.bool, (batch,))
        _expect("tokens", tokens, torch.int64, (batch, tokens.shape[-1]))
        _expect("token_mask", token_mask, torch.bool, tuple(tokens.shape))
        patches = self.config.tokens_per_image
        valid = torch.cat([*(mask[:, None].expand(-1, patches) for mask in image_masks), token_mask], dim=1)
        embedded = torch.cat([self.embed_images(images), self.embed_tokens(tokens)], dim=1)
        return self.encode_embedded(embedded, valid, horizon)

    def encode_embedded(self, embedded: Tensor, valid: Tensor, horizon: int) -> PrefixContext:
        """Put an embedded prefix [B, P, width] with validity bool [B, P] through the prefix transformer."""
        batch, length, _ = embedded.shape
        stores = self.new_stores(batch, length + horizon)
        self.write_prefix(stores, embedded, valid, masked=True)
        return self.prefix_context(stores, valid, horizon, masked=True)

    def new_stores(self, batch: int, length: int) -> tuple[KeyValues, ...]:
        """Room for every layer's keys and values of ``length`` positions, in one contiguous buffer."""
        config, weight = self.config.vlm, self.prefix.blocks[0].self_attn.o_proj.weight
        shape = (config.depth, 2, batch, config.num_kv_heads, length, config.head_dim)
        buffer = torch.empty(shape, dtype=weight.dtype, device=self.device)
        return tuple(KeyValues(pair[0], pair[1]) for pair in buffer)

    def write_prefix(self, stores: Sequence[KeyValues], embedded: Tensor, valid: Tensor, masked: bool) -> None:
        """Encode an embedded prefix [B, P, width] with validity bool [B, P] into the front of the stores.

        Args:
            masked: whether ``valid`` may hold False; where not, attention runs without a mask.
        """
        blocks = self.prefix.blocks
        angles = rotary(valid.cumsum(1) - 1, self.config.vlm.head_dim)
        mask = additive_mask(valid, 0, blocks[0].self_attn.dtype) if masked else None
        x = embedded.float()
        for layer, store in zip(blocks, stores, strict=True):
            x = layer(x, angles, mask, store, layer is blocks[-1])

    def prefix_context(self, stores: Sequence[KeyValues], valid: Tensor, horizon: int, masked: bool) -> PrefixContext:
        """What the suffix needs beside the stores; see `write_prefix`."""
        first = valid.sum(1, keepdim=True)
        positions = first + torch.arange(horizon, device=first.device)
        mask = additive_mask(valid, horizon, self.prefix.blocks[0].self_attn.dtype) if masked else None
        return PrefixContext(tuple(stores), rotary(positions, self.config.vlm.head_dim), mask)

    @staticmethod
    def euler_times(num_steps: int) -> list[float]:
        """Times 1, 1 - 1/N, ..., 1/N at which the velocity is evaluated; float64, as LeRobot computes them."""
        return [1.0 + step * (-1.0 / num_steps) for step in range(num_steps)]

    def time_conditioning(self, time: Tensor) -> Tensor:
        """float32 [..., width] from flow times float32 [...]: sine and cosine features through an MLP with SiLU.

        The periods run geometrically from ``min_period`` to ``max_period`` and are computed in float64: the shortest
        one, 4e-3, turns an error of 1e-7 in t into one of 1e-4 in the phase.
        """
        config = self.config
        half = config.expert.width // 2
        fraction = torch.linspace(0.0, 1.0, half, dtype=torch.float64, device=time.device)
        period = config.min_period * (config.max_period / config.min_period) ** fraction
        phase = time[..., None].double() * (2.0 * math.pi / period)
        features = torch.cat([phase.sin(), phase.cos()], dim=-1).float()
        return functional.silu(self.time_mlp_out(functional.silu(self.time_mlp_in(features))))

    def step_modulation(self, time: Tensor) -> StepModulation:
        """What every adaptive norm needs at flow times float32 [B or 1, H or 1]."""
        conditioning = self.time_conditioning(time)
        layers = tuple(
            (
                layer.input_layernorm.modulation(conditioning),
                layer.post_attention_layernorm.modulation(conditioning),
            )
            for layer in self.expert.blocks
        )
        return StepModulation(layers, self.expert.norm.modulation(conditioning))

    def denoise(self, prefix: PrefixContext, noise: Tensor, num_steps: int) -> Tensor:
        """Integrate from noise float32 [B, H, D] at t = 1 to actions at t = 0 in ``num_steps`` Euler steps.

        Raises:
            ObservationError: ``observation.model_input`` where the noise does not fit the prefix or the configuration.
        """
        batch, _, horizon, _ = prefix.suffix_angles.cos.shape
        _expect("noise", noise, torch.float32, (batch, horizon, self.config.action_dim))
        if num_steps < 1:
            raise ObservationError("model_input", f"num_steps: at least 1 expected, got {num_steps}")
        x = noise
        for modulation in self.modulations(self.euler_times(num_steps)):
            x = x - (1.0 / num_steps) * self.velocity(prefix, x, modulation)
        return x

    def modulations(self, times: Sequence[float]) -> list[StepModulation]:
        """The modulation of every step. It depends on the times alone, not on the observation."""
        return [
            self.step_modulation(torch.full((1, 1), time, dtype=torch.float32, device=self.device)) for time in times
        ]

    def velocity(self, prefix: PrefixContext, x: Tensor, modulation: StepModulation) -> Tensor:
        """The flow's velocity float32 [B, H, D] at x float32 [B, H, D]; overwrites the suffix part of the stores."""
        hidden = self.action_in_proj(x)
        for layer, store, (before_attention, before_mlp) in zip(
            self.expert.blocks, prefix.stores, modulation.layers, strict=True
        ):
            hidden = layer(hidden, prefix.suffix_angles, prefix.suffix_mask, store, before_attention, before_mlp)
        return self.action_out_proj(self.expert.norm(hidden, modulation.final))


def additive_mask(valid: Tensor, extra: int, dtype: torch.dtype) -> Tensor:
    """bool [B, P] -> additive [B, 1, 1, P + extra]; the ``extra`` last positions are valid.

    Rows begin at multiples of 16 elements: CUDA's memory-efficient attention would copy the mask at every call else.
    """
    batch, length = valid.shape
    width = length + extra
    mask = torch.zeros(batch, 1, 1, -(-width // 16) * 16, dtype=dtype, device=valid.device)[..., :width]
    mask[..., :length].masked_fill_(~valid[:, None, None], MASKED)
    return mask


def _expect(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if tensor.dtype != dtype or tuple(tensor.shape) != shape:
        raise ObservationError(
            "model_input", f"{name}: {dtype} {list(shape)} expected, got {tensor.dtype} {list(tensor.shape)}"
        )
