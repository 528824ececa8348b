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

from pi05_ros.model.config import Pi05Config
from pi05_ros.model.gemma import ExpertTransformer, KeyValues, Modulation, PrefixTransformer, Rotary, rotary
from pi05_ros.model.siglip import Projector, VisionTower

# Additive mask of the references; finite, so that a row with nothing to attend to gives no NaN.
MASKED = -2.3819763e38


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

    def embed_images(self, images: Sequence[Tensor]) -> Tensor:
        """Per camera [B, 3, S, S] -> image tokens [B, cameras * patches, width], not scaled; one pass for all."""
        features = self.projector(self.vision(torch.cat(list(images))))
        per_camera = features.unflatten(0, (len(images), -1))
        return per_camera.transpose(0, 1).flatten(1, 2)

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
        """
        horizon = self.config.horizon if horizon is None else horizon
        patches = self.config.tokens_per_image
        valid = torch.cat([*(mask[:, None].expand(-1, patches) for mask in image_masks), token_mask], dim=1)
        embedded = torch.cat([self.embed_images(images), self.embed_tokens(tokens)], dim=1)
        return self.encode_embedded(embedded, valid, horizon)

    def encode_embedded(self, embedded: Tensor, valid: Tensor, horizon: int) -> PrefixContext:
        """Put an embedded prefix [B, P, width] with validity bool [B, P] through the prefix transformer."""
        batch, length, _ = embedded.shape
        config = self.config.vlm
        x = embedded.float()
        dtype = self.prefix.blocks[0].self_attn.dtype
        angles = rotary(valid.cumsum(1) - 1, config.head_dim)
        mask = x.new_zeros(batch, 1, 1, length + horizon, dtype=dtype)
        mask[..., :length].masked_fill_(~valid[:, None, None], MASKED)
        shape = (config.depth, 2, batch, config.num_kv_heads, length + horizon, config.head_dim)
        buffer = x.new_empty(shape, dtype=dtype)
        stores = tuple(KeyValues(pair[0], pair[1]) for pair in buffer)
        for layer, store in zip(self.prefix.blocks[:-1], stores[:-1], strict=True):
            x = layer(x, angles, mask[..., :length], store)
        self.prefix.blocks[-1].write_key_values(x, angles, stores[-1])
        first = valid.sum(1, keepdim=True)
        positions = first + torch.arange(horizon, device=first.device)
        return PrefixContext(stores, rotary(positions, config.head_dim), mask)

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
        """Integrate from noise float32 [B, H, D] at t = 1 to actions at t = 0 in ``num_steps`` Euler steps."""
        x = noise.float()
        for modulation in self.modulations(self.euler_times(num_steps)):
            x = x - (1.0 / num_steps) * self.velocity(prefix, x, modulation)
        return x

    def modulations(self, times: Sequence[float]) -> list[StepModulation]:
        """The modulation of every step. It depends on the times alone, not on the observation."""
        device = self.action_in_proj.weight.device
        return [self.step_modulation(torch.full((1, 1), time, dtype=torch.float32, device=device)) for time in times]

    def velocity(self, prefix: PrefixContext, x: Tensor, modulation: StepModulation) -> Tensor:
        """The flow's velocity float32 [B, H, D] at x float32 [B, H, D]; overwrites the suffix part of the stores."""
        hidden = self.action_in_proj(x)
        for layer, store, (before_attention, before_mlp) in zip(
            self.expert.blocks, prefix.stores, modulation.layers, strict=True
        ):
            hidden = layer(hidden, prefix.suffix_angles, prefix.suffix_mask, store, before_attention, before_mlp)
        return self.action_out_proj(self.expert.norm(hidden, modulation.final))
