"""Profile against checkpoint: what does not fit is refused with both sides named, what fits is printed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from checkpoint_folders import LIBERO, TINY

from pi05_ros.checkpoint.description import Checkpoint, RelativeActions
from pi05_ros.checkpoint.formats import open_checkpoint
from pi05_ros.checkpoint.make import random_statistics, write_lerobot, write_openpi
from pi05_ros.contract import check_contract
from pi05_ros.errors import ContractError
from pi05_ros.profile import Profile, load_profile, parse_profile


@pytest.fixture(scope="module")
def libero(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(write_lerobot(tmp_path_factory.mktemp("c") / "pi05_libero", TINY, LIBERO))


@pytest.fixture(scope="module")
def openpi(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    config = replace(TINY, horizon=10)
    return open_checkpoint(write_openpi(tmp_path_factory.mktemp("o") / "pi05_libero", config, LIBERO))


def edited(profile: str, **changes: object) -> Profile:
    content = load_profile(profile).model_dump(mode="json")
    content.update(changes)
    return parse_profile(content, f"{profile}.yaml")


def test_both_libero_kinds_fit(libero: Checkpoint, openpi: Checkpoint):
    contract = check_contract(load_profile("libero"), libero)
    assert contract.slots == (("image", "image"), ("image2", "image2"), ("empty_camera_0", None))
    assert contract.absent_camera_order == "last" and contract.resize == "torch" and contract.state_in_prompt
    contract = check_contract(load_profile("libero_openpi"), openpi)
    assert contract.slots[2] == ("right_wrist_0_rgb", None) and contract.horizon == 10
    assert contract.absent_camera_order == "in_place" and contract.resize == "pil" and not contract.state_in_prompt
    table = contract.table()
    for word in ("wrist_image -> ", "absent -> ", "quantile", "10 steps, 5 executed", "not used"):
        assert word in " ".join(table.split())


@pytest.mark.parametrize(
    ("changes", "code", "names"),
    [
        ({"cameras": {"front": {"slot": "front"}}, "anchor": "front"}, "cameras", ["front", "image2"]),
        ({"cameras": {"image": {"slot": "image"}}}, "cameras", ["image2", "neither fed nor named"]),
        (
            {"cameras": {"image": {"slot": "image"}, "a": {"slot": "image2"}, "b": {"slot": "empty_camera_0"}}},
            "cameras",
            ["empty_camera_0", "cannot be fed"],
        ),
        ({"state": {"dims": [{"name": "x", "unit": "m"}]}}, "state_width", ["1 dimensions", "has 8"]),
        (
            {"action": {"dims": [{"name": "x", "unit": "m", "control": "position"}]}},
            "action_width",
            ["1 dimensions", "has 7"],
        ),
        ({"timing": {"horizon": 10}}, "horizon", ["10", "50"]),
        ({"timing": {"executed_steps": 51}}, "executed_steps", ["51", "50"]),
        ({"model": {"state_in_prompt": False}}, "state_in_prompt", ["False", "True"]),
        ({"model": {"normalization": "mean_std"}}, "normalization", ["mean_std", "quantile"]),
    ],
)
def test_what_does_not_fit_names_both_sides(libero: Checkpoint, changes: dict, code: str, names: list[str]):
    with pytest.raises(ContractError) as caught:
        check_contract(edited("libero", **changes), libero)
    assert caught.value.code == f"contract.{code}"
    for name in names:
        assert name in str(caught.value)


def test_horizon_of_another_checkpoint_is_refused(libero: Checkpoint):
    with pytest.raises(ContractError, match=r"profile says 10, the checkpoint says 50"):
        check_contract(edited("libero", timing={"horizon": 10}), libero)


def test_statistics_of_the_wrong_kind_or_width(libero: Checkpoint):
    means = random_statistics(8, 1, "mean_std")
    with pytest.raises(Exception, match="q01") as caught:
        check_contract(load_profile("libero"), replace(libero, state_statistics=means))
    assert caught.value.code == "checkpoint.statistics_missing"  # type: ignore[attr-defined]
    with pytest.raises(ContractError, match="8 dimensions.*have 9") as caught:
        check_contract(load_profile("libero"), replace(libero, state_statistics=random_statistics(9, 1)))
    assert caught.value.code == "contract.statistics_width"


def test_normalization_can_be_said_in_so_many_words(libero: Checkpoint):
    assert check_contract(load_profile("libero"), libero, "none").normalization == "none"
    assert check_contract(load_profile("libero"), libero, "mean_std").normalization == "mean_std"
    with pytest.raises(ContractError, match="quantiles"):
        check_contract(load_profile("libero"), libero, "quantiles")


def test_action_names_and_their_order(libero: Checkpoint):
    names = tuple(dim.name for dim in load_profile("libero").action.dims)
    assert check_contract(load_profile("libero"), replace(libero, action_names=names))
    permuted = (names[1], names[0], *names[2:])
    with pytest.raises(ContractError, match="order") as caught:
        check_contract(load_profile("libero"), replace(libero, action_names=permuted))
    assert caught.value.code == "contract.action_names"


def test_relative_actions_of_both_sides(libero: Checkpoint):
    stated = replace(libero, relative_actions=RelativeActions((True,) * 6 + (False,)))
    assert check_contract(load_profile("libero"), stated).relative.tolist() == [True] * 6 + [False]
    dims = load_profile("libero").model_dump(mode="json")["action"]["dims"]
    dims[0]["relative"] = False
    with pytest.raises(ContractError, match="x: profile libero says relative: False, .*says True"):
        check_contract(edited("libero", action={"dims": dims}), stated)
    with pytest.raises(ContractError, match="gripper is always absolute"):
        check_contract(load_profile("libero"), replace(libero, relative_actions=RelativeActions((True,) * 7)))


def test_near_constant_dimensions_are_named(libero: Checkpoint):
    statistics = random_statistics(7, 2)
    assert statistics.q01 is not None and statistics.q99 is not None
    statistics.q99[6] = statistics.q01[6]
    table = check_contract(load_profile("libero"), replace(libero, action_statistics=statistics)).table()
    assert "action gripper" in table


def test_rename_map_counts(libero: Checkpoint):
    renamed = replace(libero, camera_aliases={"top": "image"})
    cameras = {"top": {"slot": "top"}, "image2": {"slot": "image2"}}
    contract = check_contract(edited("libero", cameras=cameras, anchor="top"), renamed)
    assert contract.slots[0] == ("image", "top")


def test_padded_statistics_of_openpi_fit(openpi: Checkpoint, tmp_path: Path):
    wide = replace(openpi, state_statistics=random_statistics(32, 1), action_statistics=random_statistics(32, 2))
    assert check_contract(load_profile("libero_openpi"), wide).action_dim == 7
    narrow = replace(openpi, action_statistics=random_statistics(6, 2))
    with pytest.raises(ContractError, match="7 dimensions.*have 6"):
        check_contract(load_profile("libero_openpi"), narrow)
