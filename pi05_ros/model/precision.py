"""Which parameters stay float32 in bfloat16 mode, and how a word for a precision becomes a dtype."""

from __future__ import annotations

import torch
from torch import nn

from pi05_ros.errors import ConfigurationError

# OpenPI's mixed precision: position information, norms and the small heads around the flow stay float32.
_FLOAT32_PARTS = (
    "embeddings.patch_embedding",
    "embeddings.position_embedding",
    "input_layernorm",
    "post_attention_layernorm",
    "language_model.norm.",
    "gemma_expert.model.norm.",
)
_FLOAT32_HEADS = ("action_in_proj.", "action_out_proj.", "time_mlp_in.", "time_mlp_out.")


def is_float32_parameter(name: str) -> bool:
    """Whether the parameter of this canonical name stays float32 when the model is bfloat16."""
    return name.startswith(_FLOAT32_HEADS) or any(part in name for part in _FLOAT32_PARTS)


def parameter_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype of one parameter in a model of ``dtype``."""
    return torch.float32 if is_float32_parameter(name) else dtype


def cast_model(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Bring every parameter into its dtype, in place; returns ``model``."""
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(parameter_dtype(name, dtype))
    return model


def resolve_dtype(word: str, device: torch.device | str) -> torch.dtype:
    """``auto`` is float32 on a CPU (which has no fast bfloat16) and bfloat16 on CUDA.

    Raises:
        ConfigurationError: ``config.dtype`` for another word, or ``auto`` on another kind of device.
    """
    known = {"bfloat16": torch.bfloat16, "float32": torch.float32}
    if word == "auto":
        automatic = {"cpu": torch.float32, "cuda": torch.bfloat16}
        kind = torch.device(device).type
        if kind not in automatic:
            raise ConfigurationError("dtype", f"dtype auto is known on cpu and cuda, the device is {kind}; say which")
        return automatic[kind]
    if word not in known:
        raise ConfigurationError("dtype", f"dtype: auto, bfloat16 or float32 expected, got {word!r}")
    return known[word]
