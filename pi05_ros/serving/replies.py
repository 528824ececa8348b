"""Answers of the scheduler to the replies that the protocols define."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from pi05_ros.chunk import ActionChunk
from pi05_ros.engine.scheduler import Answer
from pi05_ros.serving.facts import PARALLEL, PolicyFacts
from pi05_ros.serving.schema import Ask

# Name in the reply -> stage of `ActionChunk.timings_ms`; a stage that did not take place took no time.
_STAGES = {
    "preprocess_ms": "preprocess",
    "cache_lookup_ms": "cache_lookup",
    "prefix_ms": "prefix",
    "action_denoise_ms": "action_denoise",
    "postprocess_ms": "postprocess",
}


def envelope(
    ask: Ask, answers: Sequence[Answer], facts: PolicyFacts, request_id: str | int, arrays: bool
) -> dict[str, Any]:
    """``action.generation``, one ``data`` entry for each candidate."""
    chunk = answers[0].chunk
    data = []
    for index, answer in enumerate(answers):
        rows = answer.chunk.actions[: ask.horizon]
        action = {
            "type": "continuous",
            "dtype": "float32",
            "shape": list(rows.shape),
            "values": _values(rows, arrays),
            "space": ask.action_space,
        }
        data.append({"index": index, "input_index": 0, "candidate_index": index, "action": action})
    reply: dict[str, Any] = {
        "id": request_id,
        "object": "action.generation",
        "created": int(time.time()),
        "model": facts.model,
        "data": data,
        "usage": {
            "batch_size": answers[0].group_size,
            "action_horizon": len(chunk.actions[: ask.horizon]),
            "action_dim": chunk.action_dim,
            "denoise_steps": chunk.denoise_steps,
            "prefix_cache_hit": chunk.cache_hit,
        },
    }
    if ask.return_timing:
        reply["timings"] = timings(chunk)
    return {**reply, **_around(ask, answers, facts)}


def raw(ask: Ask, answers: Sequence[Answer], facts: PolicyFacts, request_id: str | int, arrays: bool) -> dict[str, Any]:
    """The policy's own payload; ``actions`` has a leading axis where several candidates were asked for."""
    chunk = answers[0].chunk
    rows = [answer.chunk.actions[: ask.horizon] for answer in answers]
    reply: dict[str, Any] = {
        "request_id": request_id,
        "actions": _values(rows[0] if len(rows) == 1 else np.stack(rows), arrays),
        "parameters": {
            "num_inference_steps": chunk.denoise_steps,
            "action_horizon": len(rows[0]),
            "action_dim": chunk.action_dim,
            "num_candidates": len(rows),
            "action_space": ask.action_space,
        },
    }
    if ask.return_timing:
        reply["timings"] = timings(chunk)
    return {**reply, **_around(ask, answers, facts)}


def openpi(ask: Ask, answer: Answer, previous_total_ms: float | None) -> dict[str, Any]:
    """OpenPI's reply. ``actions`` is its only array: its clients slice every array by time step."""
    chunk = answer.chunk
    reply: dict[str, Any] = {
        "actions": chunk.actions[: ask.horizon],
        "server_timing": {"infer_ms": answer.infer_ms, "queue_ms": answer.queue_ms},
        "policy_timing": {"infer_ms": sum(chunk.timings_ms.values())},
    }
    if previous_total_ms is not None:
        reply["server_timing"]["prev_total_ms"] = previous_total_ms
    if ask.request_id is not None:
        reply["request_id"] = ask.request_id
    if chunk.noise_seed is not None:
        reply["noise_seed"] = chunk.noise_seed
    return reply


def timings(chunk: ActionChunk) -> dict[str, float]:
    """Milliseconds by stage, under the names of the protocol."""
    return {name: float(chunk.timings_ms.get(stage, 0.0)) for name, stage in _STAGES.items()}


def _values(rows: np.ndarray, arrays: bool) -> Any:
    return np.ascontiguousarray(rows, dtype=np.float32) if arrays else rows.tolist()


def _around(ask: Ask, answers: Sequence[Answer], facts: PolicyFacts) -> dict[str, Any]:
    chunk = answers[0].chunk
    return {
        "cache": {
            "hit": chunk.cache_hit,
            "scope": "global",
            "mode": "exact" if facts.prefix_cache and ask.prefix_cache is not False else "off",
            "prefix_len": facts.prefix_length,
        },
        "parallel": PARALLEL,
        "seeds": [answer.chunk.noise_seed for answer in answers],
        "guard": {"flags": list(chunk.guard_flags), "clamp_count": sum(one.chunk.clamp_count for one in answers)},
    }
