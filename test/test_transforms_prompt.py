"""Task and state become the prompt's text exactly as in training."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pi05_ros.errors import ObservationError
from pi05_ros.transforms.prompt import clean_task, discretize_state, format_prompt

GOLDEN = json.loads((Path(__file__).parent / "golden" / "preproc_golden.json").read_text())


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_bins_equal_the_references(dtype: type) -> None:
    golden = GOLDEN[f"discretise_{np.dtype(dtype).name}"]
    bins = discretize_state(np.array(golden["x"], dtype=dtype))
    assert bins.dtype == np.int64
    assert bins.tolist() == golden["bin"]


def test_bins_are_not_clipped() -> None:
    assert discretize_state(np.array([-1.5, 7.0])).tolist() == [-1, 255]


@given(st.integers(0, 255), st.floats(0.01, 0.99))
def test_every_bin_is_one_256th_of_the_range(index: int, inside: float) -> None:
    assert discretize_state(np.array([-1 + (index + inside) / 128])).tolist() == [index]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_refused_by_dimension(bad: float) -> None:
    with pytest.raises(ObservationError, match=r"\[1, 3\]") as caught:
        discretize_state(np.array([0.0, bad, 0.5, bad]))
    assert caught.value.code == "observation.state_not_finite"


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        (" Pick_up the\nBlock ", "Pick up the Block"),
        ("open  the   top drawer!", "open  the   top drawer!"),
        ("\n_x_\n", " x "),
        ("a\r\nb\tc", "a\r b\tc"),
        ("", ""),
    ],
)
def test_cleaning(text: str, cleaned: str) -> None:
    assert clean_task(text) == cleaned


@pytest.mark.parametrize("bad", [b"bytes", None, 7, "broken \ud800 surrogate"])
def test_what_is_no_text_is_refused(bad: object) -> None:
    with pytest.raises(ObservationError) as caught:
        clean_task(bad)  # type: ignore[arg-type]
    assert caught.value.code == "observation.prompt"


def test_formats() -> None:
    bins = discretize_state(np.array([-1.2, 0.0, 1.0]))
    assert format_prompt(" Pick_up ", bins) == "Task: Pick up, State: -1 128 255;\nAction: "
    assert format_prompt(" Pick_up ", None) == "Pick up\n"
    assert format_prompt("x", [0, 255]) == "Task: x, State: 0 255;\nAction: "


def test_prompt_of_the_lerobot_pipeline() -> None:
    from safetensors.numpy import load_file

    golden = json.loads((Path(__file__).parent / "golden" / "lerobot_e2e.json").read_text())
    state = load_file(Path(__file__).parent / "golden" / "lerobot_e2e.safetensors")["norm.state"][0]
    assert format_prompt(golden["task"], discretize_state(state)) == golden["prompt"][0]


def test_cleaning_happens_once() -> None:
    assert format_prompt("_x_", [0]) == "Task:  x , State: 0;\nAction: "
