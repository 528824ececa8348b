"""What the page shows: the newest picture of what the policy saw, said and refused. Written by the inference thread
and the node, read by the server; every field is replaced whole, so no lock is needed."""

from __future__ import annotations

import io
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from pi05_ros.engine.scheduler import Answer, Scheduler, Served
from pi05_ros.serving.facts import PolicyFacts
from pi05_ros.serving.failures import Failure, describe

_WINDOW = 512
_ERRORS = 20
_EDGES_MS = (1, 2, 5, 10, 15, 20, 25, 30, 40, 50, 75, 100, 150, 200, 300, 500, 1000, 2000, 5000)


@dataclass(frozen=True)
class _Seen:
    """The newest answered request, and when (`time.time`)."""

    served: Served
    at: float


class Board:
    """Collects what the page shows."""

    def __init__(self, facts: PolicyFacts, scheduler: Scheduler) -> None:
        self._facts = facts
        self._scheduler = scheduler
        self._seen: _Seen | None = None
        self._count = 0
        self._latencies: deque[float] = deque(maxlen=_WINDOW)
        self._errors: deque[dict[str, Any]] = deque(maxlen=_ERRORS)
        self.ages_s: Mapping[str, float] = {}

    def see(self, served: Served) -> None:
        """Keep the newest answered request; called on the inference thread, so nothing is computed here."""
        self._seen = _Seen(served, time.time())

    def observe(self, control: bool, answer: Answer | None, error: BaseException | None) -> None:
        """Take note of one request of the scheduler."""
        if answer is not None:
            self._count += 1
            self._latencies.append(answer.queue_ms + answer.infer_ms)
        elif error is not None and control:
            # What is refused to the network is told by its door, with what never came as far as the scheduler.
            self.refuse("control", describe(error))

    def refuse(self, door: str, failure: Failure) -> None:
        """Take note of a refusal."""
        self._errors.append({"at": time.time(), "door": door, "code": failure.code, "message": failure.message[:300]})

    def picture(self, slot: str) -> bytes | None:
        """JPEG of a slot as the model saw it last; ``None`` where it saw nothing."""
        seen = self._seen
        pictures = {} if seen is None else self._pictures(seen.served)
        if slot not in pictures:
            return None
        pixels = (np.asarray(pictures[slot]).transpose(1, 2, 0) + 1.0) * 127.5
        file = io.BytesIO()
        Image.fromarray(np.clip(np.rint(pixels), 0, 255).astype(np.uint8)).save(file, "JPEG", quality=85)
        return file.getvalue()

    def _pictures(self, served: Served) -> Mapping[str, Any]:
        """Slot -> float32 [3, S, S] in [-1, 1], for the cameras that were there."""
        inputs = getattr(served.prepared, "inputs", None)
        if inputs is None:
            return {}
        masks = served.work.how.get("image_masks", {})
        images = served.work.observation.images
        # Present cameras keep the order of their slots, wherever the absent ones stand.
        slots = [slot for slot, camera in self._facts.slots if camera in images and masks.get(camera, True)]
        shown = [image for image, present in zip(inputs.images, inputs.image_masks, strict=True) if present]
        return dict(zip(slots, shown, strict=True))

    def state(self) -> dict[str, Any]:
        """Everything the page shows but the pictures; plain values."""
        seen = self._seen
        latencies = np.array(self._latencies)
        described: dict[str, Any] = {
            "active": self._scheduler.active,
            "reason": self._scheduler.reason,
            "profile": self._facts.profile.name,
            "checkpoint": self._facts.checkpoint_id,
            "slots": [{"slot": slot, "camera": camera} for slot, camera in self._facts.slots],
            "queue": self._scheduler.depth,
            "count": self._count,
            "ages_s": dict(self.ages_s),
            "errors": list(self._errors)[::-1],
            "latency": None,
            "chunk": None,
        }
        if latencies.size:
            counts, _ = np.histogram(latencies, bins=[0, *_EDGES_MS, np.inf])
            described["latency"] = {
                "edges_ms": list(_EDGES_MS),
                "counts": counts.tolist(),
                "p50_ms": float(np.percentile(latencies, 50)),
                "p95_ms": float(np.percentile(latencies, 95)),
            }
        if seen is not None and seen.served.answer is not None:
            chunk = seen.served.answer.chunk
            described["chunk"] = {
                "age_s": time.time() - seen.at,
                "asked_by": "control loop" if seen.served.work.control else "network",
                "prompt": (chunk.prompt or "")[:300],
                "names": list(chunk.names),
                "units": list(chunk.units),
                "step_time_s": chunk.step_time_s,
                "executed_steps": chunk.executed_steps,
                "guard_flags": list(chunk.guard_flags),
                "clamp_count": chunk.clamp_count,
                "timings_ms": {stage: round(value, 3) for stage, value in chunk.timings_ms.items()},
                "pictures": list(self._pictures(seen.served)),
                "actions": chunk.actions.tolist(),
            }
        return described
