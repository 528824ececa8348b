"""Task text and state to the prompt that the model was trained on (OpenPI and LeRobot agree on it)."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from pi05_ros.errors import ObservationError

STATE_BINS = 256
# 256 left edges; the references drop the last of 257, so that 1.0 falls into bin 255.
_EDGES = np.linspace(-1.0, 1.0, STATE_BINS + 1)[:-1]

# Where no state is in the prompt, this follows the task, encoded on its own (pi0's format, OpenPI).
TASK_END = "\n"


def clean_task(text: str) -> str:
    """Strip the task and turn underscores and newlines into spaces; case and inner double spaces stay.

    Raises:
        ObservationError: ``observation.prompt`` for text that is not a string of valid Unicode.
    """
    if not isinstance(text, str):
        raise ObservationError("prompt", f"the prompt must be text, got {type(text).__name__}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ObservationError("prompt", f"the prompt is not valid Unicode at character {error.start}") from error
    return text.strip().replace("_", " ").replace("\n", " ")


def discretize_state(state: np.ndarray) -> np.ndarray:
    """Bin a normalised state of any float dtype; only the real dimensions belong in here.

    Returns:
        int64, shape of ``state``: 0 .. 255 over [-1, 1), 255 above and -1 below. Not clipped, as in the references.

    Raises:
        ObservationError: ``observation.state_not_finite``; a NaN would become bin 255 and look healthy.
    """
    state = np.asarray(state)
    bad = np.flatnonzero(~np.isfinite(state))
    if bad.size:
        raise ObservationError(
            "state_not_finite",
            f"the normalised state is NaN or infinite in dimensions {bad.tolist()}",
            {"dimensions": bad.tolist()},
        )
    return np.digitize(state, _EDGES) - 1


def format_prompt(task: str, bins: Iterable[int] | None) -> str:
    """The prompt's text: task cleaned; with the state's bins, or without (``None``) where the model has none."""
    return join_prompt(clean_task(task), bins)


def join_prompt(cleaned: str, bins: Iterable[int] | None) -> str:
    """`format_prompt` for a cleaned task; cleaning twice would strip what underscores at the ends became."""
    if bins is None:
        return cleaned + TASK_END
    return f"Task: {cleaned}, State: {' '.join(str(int(b)) for b in bins)};\nAction: "
