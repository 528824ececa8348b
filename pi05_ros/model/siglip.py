"""SigLIP's vision transformer (Zhai et al., 2023, arXiv:2303.15343; shape-optimised So400m/14 at full size).

Module names are those of the checkpoints.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from pi05_ros.model.config import VisionConfig
from pi05_ros.model.gemma import scaled_dot_product_attention, stack_linears

LAYER_NORM_EPS = 1e-6


class LayerNorm(nn.LayerNorm):
    """Layer norm of a float32 stream, in the dtype of its weights."""

    def forward(self, x: Tensor) -> Tensor:
        normed = functional.layer_norm(x, self.normalized_shape, self.weight.float(), self.bias.float(), self.eps)
        return normed.to(self.weight.dtype)


class PatchEmbedding(nn.Module):
    """The convolution whose stride is its kernel, as one matrix product over patches.

    A float32 convolution would run in TF32 on CUDA, by torch's default.
    """

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.patch_size = config.patch_size
        self.per_side = config.image_size // config.patch_size
        weight = torch.empty(config.hidden_size, 3, config.patch_size, config.patch_size)
        # An initialiser, not arithmetic: the loader leaves initialisers out on the meta device.
        self.weight = nn.Parameter(nn.init.normal_(weight, std=0.02))
        self.bias = nn.Parameter(torch.zeros(config.hidden_size))

    def forward(self, images: Tensor) -> Tensor:
        """[N, 3, S, S] -> [N, patches, width], patches row by row."""
        cells = (self.per_side, self.patch_size)
        side = self.per_side * self.patch_size
        grid = images[:, :, :side, :side].unflatten(3, cells).unflatten(2, cells)  # [N, 3, row, y, column, x]
        patches = grid.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
        return functional.linear(patches, self.weight.flatten(1), self.bias)


class VisionEmbeddings(nn.Module):
    """Patches plus learned positions, in float32: [N, 3, S, S] -> [N, patches, width]."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.patch_embedding = PatchEmbedding(config)
        self.position_embedding = nn.Embedding((config.image_size // config.patch_size) ** 2, config.hidden_size)

    def forward(self, images: Tensor) -> Tensor:
        return self.patch_embedding(images) + self.position_embedding.weight


class VisionAttention(nn.Module):
    """Full self-attention with biases."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.num_heads = config.num_attention_heads
        self.q_proj = nn.Linear(width, width)
        self.k_proj = nn.Linear(width, width)
        self.v_proj = nn.Linear(width, width)
        self.out_proj = nn.Linear(width, width)
        self.qkv_proj: nn.Linear | None = None

    def pack(self) -> None:
        """Put the three projections into one matrix; the plain ones are gone then."""
        if self.qkv_proj is None:
            self.qkv_proj = stack_linears(self.q_proj, self.k_proj, self.v_proj)
            del self.q_proj, self.k_proj, self.v_proj

    def forward(self, x: Tensor) -> Tensor:
        projected = (
            (self.q_proj(x), self.k_proj(x), self.v_proj(x)) if self.qkv_proj is None else self.qkv_proj(x).chunk(3, -1)
        )
        query, key, value = (one.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for one in projected)
        mixed = scaled_dot_product_attention(query, key, value)
        return self.out_proj(mixed.transpose(1, 2).flatten(2))


class VisionMLP(nn.Module):
    """Two layers with tanh-approximated GELU."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(functional.gelu(self.fc1(x), approximate="tanh"))


class VisionLayer(nn.Module):
    """Pre-norm transformer layer with a float32 residual stream."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.layer_norm1 = LayerNorm(config.hidden_size, eps=LAYER_NORM_EPS)
        self.self_attn = VisionAttention(config)
        self.layer_norm2 = LayerNorm(config.hidden_size, eps=LAYER_NORM_EPS)
        self.mlp = VisionMLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.layer_norm1(x))
        return x + self.mlp(self.layer_norm2(x))


class VisionEncoder(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(VisionLayer(config) for _ in range(config.num_hidden_layers))


class VisionTransformer(nn.Module):
    """[N, 3, S, S] in [-1, 1] -> patch features [N, patches, width] in the layers' dtype."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.embeddings = VisionEmbeddings(config)
        self.encoder = VisionEncoder(config)
        self.post_layernorm = LayerNorm(config.hidden_size, eps=LAYER_NORM_EPS)

    @property
    def blocks(self) -> list[VisionLayer]:
        """The layers, typed."""
        return cast("list[VisionLayer]", list(self.encoder.layers))

    def forward(self, images: Tensor) -> Tensor:
        x = self.embeddings(images)
        for layer in self.encoder.layers:
            x = layer(x)
        return self.post_layernorm(x)


class VisionTower(nn.Module):
    """Holds the transformer under the name that checkpoints give it."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.vision_model = VisionTransformer(config)

    def forward(self, images: Tensor) -> Tensor:
        return self.vision_model(images)


class Projector(nn.Module):
    """Vision width -> prefix width."""

    def __init__(self, vision_width: int, prefix_width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(vision_width, prefix_width)

    def forward(self, features: Tensor) -> Tensor:
        return self.linear(features)
