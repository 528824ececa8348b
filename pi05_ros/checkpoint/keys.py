"""One name for every weight, whichever way a checkpoint spells it.

The canonical name is LeRobot's without the leading ``model.``; it is also the parameter's name in `model.pi05.Pi05`.
"""

from __future__ import annotations

import re

EMBEDDING = "paligemma_with_expert.paligemma.model.language_model.embed_tokens.weight"
LM_HEAD = "paligemma_with_expert.paligemma.lm_head.weight"
EXPERT_LM_HEAD = "paligemma_with_expert.gemma_expert.lm_head.weight"

_PALIGEMMA = "paligemma_with_expert.paligemma."
_EXPERT = "paligemma_with_expert.gemma_expert."

_DROPPED = (
    # Pi0's continuous state input; Pi0.5 reads the state from the prompt.
    re.compile(r"^state_proj\.(weight|bias)$"),
    # Never evaluated: actions leave through action_out_proj.
    re.compile(r"^" + re.escape(EXPERT_LM_HEAD) + r"$"),
    # The expert's norms are adaptive and live in `.dense`; converters leave the plain scale behind, unused.
    re.compile(
        r"^" + re.escape(_EXPERT) + r"model\.(layers\.\d+\.(input|post_attention)_layernorm|norm)\.weight$",
    ),
)


def canonical_key(key: str) -> str | None:
    """The canonical name of a stored weight, or None for a weight that Pi0.5 does not use.

    The tied pair keeps its two names: `EMBEDDING` is used where it is stored, `LM_HEAD` stands in for it elsewhere.
    """
    key = key.removeprefix("model.")
    if key.startswith("action_time_mlp_"):
        key = key.removeprefix("action_")
    if key.startswith(_PALIGEMMA):
        key = _PALIGEMMA + _canonical_paligemma(key.removeprefix(_PALIGEMMA))
    return None if any(pattern.match(key) for pattern in _DROPPED) else key


def _canonical_paligemma(rest: str) -> str:
    # transformers < 4.52 kept a whole causal model under language_model: its decoder in .model, its head beside it.
    if rest == "language_model.lm_head.weight":
        return "lm_head.weight"
    if rest.startswith("language_model.model."):
        rest = "language_model." + rest.removeprefix("language_model.model.")
    if rest.startswith(("language_model.", "vision_tower.", "multi_modal_projector.")):
        rest = "model." + rest
    tower = "model.vision_tower."
    if rest.startswith(tower) and not rest.startswith(tower + "vision_model."):
        rest = tower + "vision_model." + rest.removeprefix(tower)
    return rest
