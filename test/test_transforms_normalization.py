"""Normalisation follows each reference's formula and dtype, and refuses statistics that do not fit."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from pi05_ros.checkpoint.statistics import Statistics
from pi05_ros.errors import CheckpointError, ConfigurationError, ContractError
from pi05_ros.transforms.normalization import Normalizer

GOLDEN = Path(__file__).parent / "golden"
OPENPI = json.loads((GOLDEN / "preproc_golden.json").read_text())["openpi_norm"]
FIELDS = ("mean", "std", "q01", "q99", "min", "max")


def statistics(**fields: object) -> Statistics:
    values = {name: None if fields.get(name) is None else np.asarray(fields[name]) for name in FIELDS}
    return Statistics(**values)


def openpi_statistics() -> Statistics:
    return statistics(**{name: OPENPI[name] for name in ("mean", "std", "q01", "q99")})


@pytest.mark.parametrize(("kind", "word"), [("quantile", "quantile"), ("mean_std", "meanstd")])
def test_openpi_formulas(kind: str, word: str) -> None:
    normalizer = Normalizer(openpi_statistics(), kind, "openpi")
    x = np.array(OPENPI["x"])
    assert normalizer.normalize(x).tolist() == OPENPI[f"normalize_{word}"]
    assert normalizer.unnormalize(x).tolist() == OPENPI[f"unnormalize_{word}"]


@pytest.fixture(scope="module")
def lerobot() -> dict[str, np.ndarray]:
    return load_file(GOLDEN / "lerobot_e2e.safetensors")


def lerobot_statistics(golden: dict[str, np.ndarray], key: str) -> Statistics:
    return statistics(**{name: golden[f"stats.{key}.{name}"] for name in FIELDS})


def test_lerobot_state_and_actions_bit_for_bit(lerobot: dict[str, np.ndarray]) -> None:
    state = Normalizer(lerobot_statistics(lerobot, "observation.state"), "quantile", "lerobot")
    out = state.normalize(lerobot["raw.state"])
    assert out.dtype == np.float32
    assert np.array_equal(out, lerobot["norm.state"][0])
    action = Normalizer(lerobot_statistics(lerobot, "action"), "quantile", "lerobot")
    out = action.unnormalize(lerobot["actions.normalized"])
    assert out.dtype == np.float32
    assert np.array_equal(out, lerobot["actions.unnormalized"])


def test_lerobot_replaces_only_a_zero_denominator() -> None:
    equal = statistics(q01=[0.5, 0.5], q99=[0.5, 0.5 + 2**-20])
    normalizer = Normalizer(equal, "quantile", "lerobot")
    below, one_unit = normalizer.normalize(np.array([0.5, 0.5 + 2**-20]))
    assert below == -1.0
    assert one_unit == 1.0  # an added eps would pull this below 1
    assert normalizer.unnormalize(np.array([1.0, 1.0]))[0] == np.float32(0.5)


def test_lerobot_mean_std_adds_eps_on_the_way_in_only() -> None:
    normalizer = Normalizer(statistics(mean=[0.0, 1.0], std=[0.0, 2.0]), "mean_std", "lerobot")
    assert normalizer.normalize(np.array([1e-8, 5.0])).tolist() == [1.0, 2.0]
    assert normalizer.unnormalize(np.array([7.0, 2.0])).tolist() == [0.0, 5.0]


@pytest.mark.parametrize("style", ["lerobot", "openpi"])
def test_identity_needs_no_statistics_and_copies(style: str) -> None:
    normalizer = Normalizer(None, "identity", style)
    x = np.array([1.5, -2.0, 1e6])
    out = normalizer.normalize(x)
    assert out.tolist() == x.tolist() and normalizer.unnormalize(x).tolist() == x.tolist()
    assert out.dtype == (np.float32 if style == "lerobot" else np.float64)
    out[0] = 9.0
    assert x[0] == 1.5


@given(
    st.lists(st.tuples(st.floats(-100, 100), st.floats(0.01, 50), st.floats(-3, 3)), min_size=1, max_size=20),
    st.sampled_from(["quantile", "mean_std"]),
    st.sampled_from(["lerobot", "openpi"]),
)
def test_there_and_back(rows: list[tuple[float, float, float]], kind: str, style: str) -> None:
    low, span, relative = (np.array(column) for column in zip(*rows, strict=True))
    normalizer = Normalizer(statistics(q01=low, q99=low + span, mean=low, std=span), kind, style)
    values = low + span * relative
    back = normalizer.unnormalize(normalizer.normalize(values))
    # mean_std in LeRobot's style leaves eps out on the way back, at most 1e-8 / 0.01 relative.
    slack = 2e-4 if style == "lerobot" else 1e-10
    assert np.abs(back - values).max() <= slack


def test_inputs_are_never_written_to() -> None:
    values = np.array(OPENPI["x"])
    for style in ("lerobot", "openpi"):
        for kind in ("quantile", "mean_std", "identity"):
            normalizer = Normalizer(openpi_statistics(), kind, style)
            normalizer.normalize(values)
            normalizer.unnormalize(values)
    assert values.tolist() == OPENPI["x"]


def test_openpi_padded_actions_pass_through_beyond_the_statistics() -> None:
    padded = np.concatenate([np.zeros((2, 6)), np.full((2, 3), 0.25)], axis=1)
    quantile = Normalizer(openpi_statistics(), "quantile", "openpi").unnormalize(padded)
    assert (quantile[:, 6:] == 0.25).all()
    assert (
        quantile[:, :6].tolist()
        == Normalizer(openpi_statistics(), "quantile", "openpi").unnormalize(padded[:, :6]).tolist()
    )
    mean_std = Normalizer(openpi_statistics(), "mean_std", "openpi").unnormalize(padded)
    assert (mean_std[:, 6:] == 0.25 * (1 + 1e-6)).all()


def test_openpi_padded_statistics_are_cut_to_the_state() -> None:
    normalizer = Normalizer(openpi_statistics(), "quantile", "openpi")
    assert normalizer.normalize(np.array(OPENPI["x"][:4])).tolist() == OPENPI["normalize_quantile"][:4]


@pytest.mark.parametrize(
    ("style", "method", "width"),
    [("lerobot", "normalize", 5), ("lerobot", "normalize", 7), ("lerobot", "unnormalize", 5),
     ("lerobot", "unnormalize", 32), ("openpi", "normalize", 7), ("openpi", "unnormalize", 5)],
)  # fmt: skip
def test_other_widths_are_refused_naming_both(style: str, method: str, width: int) -> None:
    normalizer = Normalizer(openpi_statistics(), "quantile", style, "state")
    with pytest.raises(ContractError, match=f"state: got {width} dimensions.* cover 6") as caught:
        getattr(normalizer, method)(np.zeros(width))
    assert caught.value.code == "contract.statistics_width"


def test_missing_quantiles_name_what_is_there() -> None:
    with pytest.raises(CheckpointError, match="q01 and q99.*hold mean, std;") as caught:
        Normalizer(statistics(mean=[0.0], std=[1.0]), "quantile", "openpi", "action")
    assert caught.value.code == "checkpoint.statistics_missing"
    with pytest.raises(CheckpointError, match="hold nothing"):
        Normalizer(None, "mean_std", "lerobot", "action")
    with pytest.raises(CheckpointError, match="holds std"):
        Normalizer(statistics(mean=[0.0]), "mean_std", "lerobot")


def test_unknown_kind_and_style_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="min_max"):
        Normalizer(None, "min_max", "lerobot")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="jax"):
        Normalizer(None, "identity", "jax")  # type: ignore[arg-type]


def test_near_constant_and_outside_dimensions_are_reported_by_index() -> None:
    normalizer = Normalizer(statistics(q01=[0, 1, -1], q99=[1, 1, -1 + 5e-5]), "quantile", "openpi")
    assert normalizer.near_constant_dimensions() == (1, 2)
    assert normalizer.near_constant_dimensions(span=1e-6) == (1,)
    assert normalizer.outside_dimensions(np.array([1.0, -1.5, 7.0])) == (1, 2)
    mean_std = Normalizer(statistics(mean=[0, 0], std=[0.0, 1.0]), "mean_std", "openpi")
    assert mean_std.near_constant_dimensions() == (0,)
    assert mean_std.outside_dimensions(np.array([1.0, -1.5])) == ()
    assert Normalizer(None, "identity", "openpi").near_constant_dimensions() == ()
