"""Gemma transformer layers (Gemma Team, 2024, arXiv:2403.08295), plain for the prefix and adaptive for the expert.

The expert's RMS norms take scale, shift and gate from the flow time: adaptive normalisation as in DiT (Peebles & Xie,
2023, arXiv:2212.09748), in Pi0.5 (Physical Intelligence, 2025, arXiv:2504.16054). Module names are the checkpoints'.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from pi05_ros.model.config import GemmaConfig

RMS_NORM_EPS = 1e-6
ROPE_THETA = 10_000.0


class Rotary(NamedTuple):
    """cos and sin of the rotary angles, float32 [B, 1, L, head_dim / 2]; broadcast over the heads."""

    cos: Tensor
    sin: Tensor


class Modulation(NamedTuple):
    """What an adaptive norm gets from the flow time: float32 [1 or B, 1 or H, width] each; ``scale`` is 1 + scale."""

    scale: Tensor
    shift: Tensor
    gate: Tensor


def rotary(positions: Tensor, head_dim: int) -> Rotary:
    """Rotary angles (Su et al., 2021, arXiv:2104.09864) in float32, whatever the model's dtype.

    In bfloat16 the phase of position 968 would be off by up to 1.3 rad.

    Args:
        positions: int64 [B, L].
    """
    exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
    angles = positions[:, None, :, None].float() * (1.0 / ROPE_THETA**exponents)
    return Rotary(angles.cos(), angles.sin())


def rotate(x: Tensor, angles: Rotary) -> Tensor:
    """Turn [B, heads, L, head_dim] by the angles, halves paired; computed in float32."""
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat((first * angles.cos - second * angles.sin, second * angles.cos + first * angles.sin), dim=-1)
    return turned.to(x.dtype)


def scaled_dot_product_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
    """torch's attention, with the softmax in float32. ``mask`` is additive, in the query's dtype."""
    if query.dtype == torch.bfloat16 and query.device.type == "cpu":
        # The CPU's bfloat16 kernel rounds the probabilities; a CPU has no fast bfloat16 to lose.
        wide = None if mask is None else mask.float()
        mixed = functional.scaled_dot_product_attention(query.float(), key.float(), value.float(), attn_mask=wide)
        return mixed.to(query.dtype)
    return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """Attention of grouped query heads.

    Args:
        query: [B, heads, L, head_dim]. key, value: [B, kv_heads, M, head_dim].
        mask: additive, [B, 1, 1, M] in the query's dtype, or ``None`` where nothing is masked.

    Returns:
        [B, L, heads * head_dim].
    """
    batch, heads, length, head_dim = query.shape
    kv_heads = key.shape[1]
    # Query heads that share keys are laid behind each other, so that keys and values are never repeated in memory.
    folded = query.reshape(batch, kv_heads, heads // kv_heads * length, head_dim)
    mixed = scaled_dot_product_attention(folded, key, value, mask)
    return mixed.reshape(batch, heads, length, head_dim).transpose(1, 2).flatten(2)


def _normalized(x: Tensor) -> Tensor:
    """x / rms(x) in float32."""
    wide = x.float()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + RMS_NORM_EPS)


class RMSNorm(nn.Module):
    """x / rms(x) * (1 + weight), float32 whatever the dtype of x."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return _normalized(x) * (1.0 + self.weight)


class AdaptiveRMSNorm(nn.Module):
    """x / rms(x) * (1 + scale) + shift with scale and shift from the time conditioning; float32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width, 3 * width)

    def modulation(self, conditioning: Tensor) -> Modulation:
        """Scale, shift and gate for conditioning float32 [..., width]."""
        scale, shift, gate = self.dense(conditioning).chunk(3, dim=-1)
        return Modulation(1.0 + scale, shift.contiguous(), gate.contiguous())

    def forward(self, x: Tensor, modulation: Modulation) -> Tensor:
        return _normalized(x) * modulation.scale + modulation.shift


class Attention(nn.Module):
    """Projections of multi-query self-attention; the mixing itself is `attend`."""

    def __init__(self, config: GemmaConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.query_width = config.num_heads * config.head_dim
        self.kv_width = config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.width, self.query_width, bias=False)
        self.k_proj = nn.Linear(config.width, self.kv_width, bias=False)
        self.v_proj = nn.Linear(config.width, self.kv_width, bias=False)
        self.o_proj = nn.Linear(self.query_width, config.width, bias=False)
        self.qkv_proj: nn.Linear | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights, and therefore of the matrix products."""
        return self.o_proj.weight.dtype

    def pack(self) -> None:
        """Put the three projections into one matrix; the plain ones are gone then."""
        if self.qkv_proj is None:
            self.qkv_proj = stack_linears(self.q_proj, self.k_proj, self.v_proj)
            del self.q_proj, self.k_proj, self.v_proj

    def query_key_value(self, x: Tensor, angles: Rotary) -> tuple[Tensor, Tensor, Tensor]:
        """[B, L, width] in the weights' dtype -> query and key, both rotated, and value: [B, heads, L, head_dim]."""
        if self.qkv_proj is None:
            query, key, value = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        else:
            query, key, value = self.qkv_proj(x).split((self.query_width, self.kv_width, self.kv_width), dim=-1)
        return rotate(self._heads(query), angles), rotate(self._heads(key), angles), self._heads(value)

    def key_value(self, x: Tensor, angles: Rotary) -> tuple[Tensor, Tensor]:
        """[B, L, width] -> key (rotated) and value, each [B, kv_heads, L, head_dim]."""
        if self.qkv_proj is None:
            key, value = self.k_proj(x), self.v_proj(x)
        else:
            key, value = functional.linear(x, self.qkv_proj.weight[self.query_width :]).split(self.kv_width, dim=-1)
        return rotate(self._heads(key), angles), self._heads(value)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class MLP(nn.Module):
    """Gated linear unit with tanh-approximated GELU."""

    def __init__(self, config: GemmaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.width, config.mlp_dim, bias=False)
        self.up_proj = nn.Linear(config.width, config.mlp_dim, bias=False)
        self.down_proj = nn.Linear(config.mlp_dim, config.width, bias=False)
        self.gate_up_proj: nn.Linear | None = None

    def pack(self) -> None:
        """Put gate and up into one matrix; the plain ones are gone then."""
        if self.gate_up_proj is None:
            self.gate_up_proj = stack_linears(self.gate_proj, self.up_proj)
            del self.gate_proj, self.up_proj

    def forward(self, x: Tensor) -> Tensor:
        if self.gate_up_proj is None:
            gate, up = self.gate_proj(x), self.up_proj(x)
        else:
            gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(functional.gelu(gate, approximate="tanh") * up)


def stack_linears(*layers: nn.Linear) -> nn.Linear:
    """One linear layer that computes the outputs of several behind each other."""
    with torch.no_grad():
        first = layers[0]
        stacked = nn.Linear(
            first.in_features, sum(one.out_features for one in layers), first.bias is not None, device="meta"
        )
        stacked.weight = nn.Parameter(torch.cat([one.weight for one in layers]), requires_grad=False)
        if first.bias is not None:
            stacked.bias = nn.Parameter(torch.cat([one.bias for one in layers]), requires_grad=False)
    return stacked


class KeyValues(NamedTuple):
    """One layer's keys and values [B, kv_heads, prefix + suffix, head_dim], views into one buffer.

    The prefix part is written once per observation, the suffix part at every denoise step; nothing is concatenated.
    """

    key: Tensor
    value: Tensor

    def write(self, start: int, key: Tensor, value: Tensor) -> None:
        """Put keys and values [B, kv_heads, L, head_dim] at ``start``."""
        end = start + key.shape[2]
        self.key[:, :, start:end].copy_(key)
        self.value[:, :, start:end].copy_(value)

    def first(self, length: int) -> KeyValues:
        """The first ``length`` positions, without a copy."""
        return KeyValues(self.key[:, :, :length], self.value[:, :, :length])


class PrefixLayer(nn.Module):
    """Layer of the prefix transformer. The residual stream is float32; matrix products take the weights' dtype."""

    def __init__(self, config: GemmaConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.width)
        self.post_attention_layernorm = RMSNorm(config.width)

    def forward(self, x: Tensor, angles: Rotary, mask: Tensor | None, store: KeyValues, last: bool = False) -> Tensor:
        """float32 [B, P, width] -> float32 [B, P, width]; keys and values go to the front of ``store``.

        The suffix needs only keys and values of the ``last`` layer, so that one stops there and returns x as it came.
        """
        normed = self.input_layernorm(x).to(self.self_attn.dtype)
        if last:
            store.write(0, *self.self_attn.key_value(normed, angles))
            return x
        query, key, value = self.self_attn.query_key_value(normed, angles)
        store.write(0, key, value)
        x = x + self.self_attn.o_proj(attend(query, *store.first(x.shape[1]), mask))
        return x + self.mlp(self.post_attention_layernorm(x).to(self.self_attn.dtype))


class ExpertLayer(nn.Module):
    """Layer of the action expert, with adaptive norms and gated residuals; float32 residual stream."""

    def __init__(self, config: GemmaConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = AdaptiveRMSNorm(config.width)
        self.post_attention_layernorm = AdaptiveRMSNorm(config.width)

    def forward(
        self,
        x: Tensor,
        angles: Rotary,
        mask: Tensor | None,
        store: KeyValues,
        before_attention: Modulation,
        before_mlp: Modulation,
    ) -> Tensor:
        """float32 [B, H, width] -> float32 [B, H, width]; the suffix's keys and values go to the end of ``store``."""
        normed = self.input_layernorm(x, before_attention).to(self.self_attn.dtype)
        query, key, value = self.self_attn.query_key_value(normed, angles)
        store.write(store.key.shape[2] - x.shape[1], key, value)
        mixed = attend(query, store.key, store.value, mask)
        x = x + self.self_attn.o_proj(mixed) * before_attention.gate
        normed = self.post_attention_layernorm(x, before_mlp).to(self.self_attn.dtype)
        return x + self.mlp(normed) * before_mlp.gate


class PrefixTransformer(nn.Module):
    """PaliGemma's language model, used as an encoder of the prefix.

    The final norm belongs to the checkpoints; nothing that Pi0.5 computes needs it.
    """

    def __init__(self, config: GemmaConfig, vocab: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, config.width)
        self.layers = nn.ModuleList(PrefixLayer(config) for _ in range(config.depth))
        self.norm = RMSNorm(config.width)

    @property
    def blocks(self) -> list[PrefixLayer]:
        """The layers, typed."""
        return cast("list[PrefixLayer]", list(self.layers))


class ExpertTransformer(nn.Module):
    """The action expert's layers and final adaptive norm."""

    def __init__(self, config: GemmaConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(ExpertLayer(config) for _ in range(config.depth))
        self.norm = AdaptiveRMSNorm(config.width)

    @property
    def blocks(self) -> list[ExpertLayer]:
        """The layers, typed."""
        return cast("list[ExpertLayer]", list(self.layers))
