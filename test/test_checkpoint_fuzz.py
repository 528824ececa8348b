"""Whatever lies in a folder's files: a description or a `CheckpointError`, never another exception."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from checkpoint_folders import copy, libero_folder, openpi_folder
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pi05_ros.checkpoint.formats import open_checkpoint
from pi05_ros.checkpoint.loader import load_model
from pi05_ros.errors import CheckpointError

FEW = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@pytest.fixture(scope="module")
def lerobot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return libero_folder(tmp_path_factory.mktemp("fuzz") / "lerobot", max_shard_bytes=500_000)


@pytest.fixture(scope="module")
def openpi(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return openpi_folder(tmp_path_factory.mktemp("fuzz") / "openpi")


def places(content: Any, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """Every place of a JSON document at which a value stands."""
    children: list[tuple[str | int, Any]] = []
    if isinstance(content, dict):
        children = list(content.items())
    elif isinstance(content, list):
        children = list(enumerate(content))
    return [place for key, value in children for place in [(*path, key), *places(value, (*path, key))]]


def check(folder: Path) -> None:
    try:
        load_model(open_checkpoint(folder))
    except CheckpointError as error:
        assert error.code.startswith("checkpoint.") and str(folder) in error.message


def spoil_json(source: Path, name: str, data: st.DataObject, to: Path) -> None:
    shutil.rmtree(to, ignore_errors=True)
    folder = copy(source, to)
    content = json.loads((folder / name).read_text())
    place = data.draw(st.sampled_from(places(content)))
    inner = content
    for key in place[:-1]:
        inner = inner[key]
    if data.draw(st.booleans()):
        inner[place[-1]] = data.draw(JSON)
    else:
        del inner[place[-1]]
    (folder / name).write_text(json.dumps(content))
    check(folder)


@pytest.mark.parametrize(
    "name",
    ["config.json", "policy_preprocessor.json", "policy_postprocessor.json", "model.safetensors.index.json"],
)
@FEW
@given(data=st.data())
def test_any_value_in_a_lerobot_file(lerobot: Path, tmp_path: Path, name: str, data: st.DataObject) -> None:
    spoil_json(lerobot, name, data, tmp_path / "c")


@pytest.mark.parametrize("name", ["config.json", "assets/robot/norm_stats.json"])
@FEW
@given(data=st.data())
def test_any_value_in_an_openpi_file(openpi: Path, tmp_path: Path, name: str, data: st.DataObject) -> None:
    spoil_json(openpi, name, data, tmp_path / "c")


@FEW
@given(data=st.data())
def test_any_bytes_in_a_header(openpi: Path, tmp_path: Path, data: st.DataObject) -> None:
    shutil.rmtree(tmp_path / "c", ignore_errors=True)
    file = copy(openpi, tmp_path / "c") / "model.safetensors"
    content = bytearray(file.read_bytes())
    header = 8 + int.from_bytes(content[:8], "little")
    start = data.draw(st.integers(0, header - 1))
    content[start : start + data.draw(st.integers(1, 8))] = data.draw(st.binary(max_size=8))
    file.write_bytes(content)
    check(tmp_path / "c")
