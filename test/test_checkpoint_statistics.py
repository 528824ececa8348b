"""Statistics files of both communities, and what is wrong with others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_folders import GOLDEN
from safetensors.numpy import save_file

from pi05_ros.checkpoint.statistics import Statistics, read_statistics
from pi05_ros.errors import CheckpointError

STATE = {"mean": [0.0, 1.0], "std": [1.0, 2.0], "q01": [-1.0, -2.0], "q99": [1.0, 2.0]}


def write(tmp_path: Path, content: Any) -> Path:
    file = tmp_path / "stats.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return file


def test_openpi_file_keeps_float64() -> None:
    file = GOLDEN / "openpi_assets" / "trossen" / "norm_stats.json"
    table = read_statistics(file)
    stored = json.loads(file.read_text())["norm_stats"]
    assert (table["state"].width, table["action"].width) == (8, 7)
    assert table["state"].q01 is not None and table["state"].q01.dtype == np.float64
    assert table["state"].q01.tolist() == stored["state"]["q01"]
    assert table["action"].std is not None and table["action"].std.tolist() == stored["actions"]["std"]
    assert table["action"].available() == ("mean", "std", "q01", "q99")


def test_processor_file_keeps_float32_and_equals_the_openpi_file() -> None:
    folder = GOLDEN / "hub_style_tiny"
    table = read_statistics(next(folder.glob("policy_preprocessor_step*.safetensors")))
    other = read_statistics(GOLDEN / "openpi_assets" / "trossen" / "norm_stats.json")
    for feature in ("state", "action"):
        for name in ("mean", "std", "q01", "q99"):
            mine, theirs = getattr(table[feature], name), getattr(other[feature], name)
            assert mine.dtype == np.float32
            np.testing.assert_array_equal(mine, theirs.astype(np.float32))
    assert table["state"].available() == ("mean", "std", "q01", "q99", "min", "max")


def test_data_set_file_leaves_images_and_counts_out(tmp_path: Path) -> None:
    content = {
        "observation.state": STATE | {"count": [100], "q50": [0.0, 0.0]},
        "action": {"mean": [1], "std": [2], "min": [0], "max": [3]},
        "observation.images.top": {"mean": [[[0.5]], [[0.5]], [[0.5]]]},
        "timestamp": {"mean": [1.0]},
    }
    table = read_statistics(write(tmp_path, content))
    assert table.keys() == {"state", "action"}
    assert table["state"].missing("quantile") == () and table["action"].missing("quantile") == ("q01", "q99")
    assert table["action"].missing("mean_std") == () and table["action"].missing("identity") == ()
    assert table["action"].mean is not None and table["action"].mean.dtype == np.float64


def test_one_feature_alone_is_enough(tmp_path: Path) -> None:
    assert read_statistics(write(tmp_path, {"norm_stats": {"state": STATE}})).keys() == {"state"}
    assert read_statistics(write(tmp_path, {"action": {}})) == {}


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"mean": [0.0, float("nan")]}, "finite"),
        ({"std": [float("inf"), 1.0]}, "finite"),
        ({"mean": [0.0]}, "width"),
        ({"q01": [-1.0, 3.0]}, "above"),
        ({"min": [1.0, 1.0], "max": [0.0, 2.0]}, "above"),
        ({"std": [-1.0, 1.0]}, "negative"),
        ({"mean": [[0.0, 1.0]]}, "shape"),
        ({"mean": []}, "shape"),
        ({"mean": 1.0}, "shape"),
        ({"mean": ["a", "b"]}, "dtype"),
        ({"mean": [[1.0], [1.0, 2.0]]}, "numbers"),
        ({"mean": [True, False]}, "dtype"),
    ],
)
def test_bad_numbers_are_refused(tmp_path: Path, change: dict[str, Any], word: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_statistics(write(tmp_path, {"norm_stats": {"state": STATE | change}}))
    assert caught.value.code == "checkpoint.bad_statistics" and word in caught.value.message


@pytest.mark.parametrize("content", ["", "{", "3", "[]", '{"norm_stats": 3}'])
def test_other_files_are_refused(tmp_path: Path, content: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_statistics(write(tmp_path, content))
    assert caught.value.code == "checkpoint.unreadable_statistics"


def test_feature_that_is_no_table(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="bad_statistics"):
        read_statistics(write(tmp_path, {"action": [1.0, 2.0]}))


def test_two_spellings_of_one_feature(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="both action and actions"):
        read_statistics(write(tmp_path, {"action": STATE, "actions": STATE}))


def test_missing_and_broken_files(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="missing_file"):
        read_statistics(tmp_path)
    broken = tmp_path / "p.safetensors"
    broken.write_bytes(b"\x00" * 4)
    with pytest.raises(CheckpointError, match="unreadable_statistics"):
        read_statistics(broken)


def test_integer_tensors_become_floats(tmp_path: Path) -> None:
    save_file({"action.mean": np.array([1, 2]), "action.std": np.array([1, 1])}, tmp_path / "p.safetensors")
    statistics = read_statistics(tmp_path / "p.safetensors")["action"]
    assert statistics.mean is not None and statistics.mean.tolist() == [1.0, 2.0]
    assert isinstance(statistics, Statistics)
