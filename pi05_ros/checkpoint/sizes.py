"""Sizes of the network: by name, or from a config.json's ``architecture`` block."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from pi05_ros.errors import CheckpointError, Pi05Error
from pi05_ros.model.config import Pi05Config


def network_config(
    raw: dict[str, Any],
    file: Path,
    *,
    action_dim: int,
    horizon: int,
    max_token_len: int = 200,
    min_period: float = 4e-3,
    max_period: float = 4.0,
) -> Pi05Config:
    """Sizes as a config.json states them.

    An ``architecture`` block gives all of them. Without one the names in ``paligemma_variant`` (default gemma_2b) and
    ``action_expert_variant`` (default gemma_300m) do; both formats know these two sizes.

    Raises:
        CheckpointError: ``checkpoint.unsupported_variant``, ``checkpoint.bad_config``.
    """
    stated: dict[str, Any] = {
        "action_dim": action_dim,
        "horizon": horizon,
        "max_token_len": max_token_len,
        "min_period": min_period,
        "max_period": max_period,
    }
    block = raw.get("architecture")
    if block is not None:
        try:
            return Pi05Config.from_architecture(block, **stated)
        except (Pi05Error, TypeError) as error:
            message = error.message if isinstance(error, Pi05Error) else str(error)
            raise CheckpointError("bad_config", f"{file}: {message}") from error
    full = Pi05Config.full()
    known = {"gemma_2b": full.vlm, "gemma_300m": full.expert}
    variants = (str(raw.get("paligemma_variant", "gemma_2b")), str(raw.get("action_expert_variant", "gemma_300m")))
    for variant in variants:
        if variant not in known:
            lora = " LoRA weights must be merged first." if "lora" in variant else ""
            raise CheckpointError(
                "unsupported_variant", f"{file}: {variant!r} is none of the known sizes {sorted(known)}.{lora}"
            )
    return replace(full, vlm=known[variants[0]], expert=known[variants[1]], **stated)
