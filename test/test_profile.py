"""Profiles: the shipped ones load, and every kind of mistake is refused with file, key and expectation."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import pytest
import yaml

from pi05_ros.errors import ProfileError
from pi05_ros.profile import available_profiles, load_profile, parse_profile

MINIMAL = {
    "name": "arm",
    "cameras": {"front": {"slot": "base_0_rgb", "topic": "front/image_raw"}},
    "state": {"sources": {"joints": {"topic": "joint_states"}}, "dims": [{"name": "a", "unit": "rad"}]},
    "action": {"dims": [{"name": "a", "unit": "rad", "control": "position"}]},
}


def changed(path: str, value: object) -> dict:
    content = copy.deepcopy(MINIMAL)
    *parents, last = path.split(".")
    place: object = content
    for key in parents:
        place = place[int(key)] if isinstance(place, list) else place.setdefault(key, {})  # type: ignore[attr-defined]
    place[last] = value  # type: ignore[index]
    return content


def test_shipped_profiles_load():
    names = [name for name in available_profiles() if name != "raw"]
    assert {"aloha", "libero", "libero_openpi", "so101", "demo"} <= set(names)
    for name in names:
        profile = load_profile(name)
        assert profile.name == name
        assert profile.anchor in profile.cameras


BASE, LEFT, RIGHT = "base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb"


@pytest.mark.parametrize(
    ("name", "slots", "state", "action", "relative", "timing", "in_prompt"),
    [
        ("aloha", [BASE, LEFT, RIGHT, None], 14, 14, [6, 13], (50, 50, 25), True),
        ("droid", [BASE, LEFT], 8, 8, None, (15, 15, 8), True),
        ("libero_openpi", [BASE, LEFT], 8, 7, None, (None, 10, 5), False),
        ("libero", ["image", "image2"], 8, 7, None, (None, None, 10), True),
        ("ur5e", [BASE, LEFT], 7, 7, [6], (20, 50, None), True),
        ("so101", ["front", "wrist"], 6, 6, None, (30, 50, 50), True),
    ],
)
def test_shipped_profiles_say_what_is_known_of_their_robots(
    name: str,
    slots: list[str | None],
    state: int,
    action: int,
    relative: list[int] | None,
    timing: tuple[float | None, int | None, int | None],
    in_prompt: bool,
):
    """``relative``: the dimensions that are absolute while all others are relative; ``None``: none is relative."""
    profile = load_profile(name)
    assert [camera.slot for camera in profile.cameras.values()] == slots
    assert (len(profile.state.dims), len(profile.action.dims)) == (state, action)
    mask = [dim.relative for dim in profile.action.dims]
    assert (not any(mask)) if relative is None else mask == [index not in relative for index in range(action)]
    assert (profile.timing.rate_hz, profile.timing.horizon, profile.timing.executed_steps) == timing
    assert profile.model.state_in_prompt is in_prompt
    assert profile.adapt_to_pi is (name == "aloha")


def test_droid_gives_velocities_within_one_and_so101_works_in_degrees():
    droid, so101 = load_profile("droid").action.dims, load_profile("so101").action.dims
    assert [(dim.control, dim.limits) for dim in droid[:7]] == [("velocity", (-1.0, 1.0))] * 7
    assert (droid[7].control, droid[7].limits) == ("gripper", None)
    assert [dim.model_unit for dim in so101] == ["deg"] * 5 + ["percent"]


@pytest.mark.parametrize(
    ("path", "value", "names"),
    [
        ("camera", {}, ["camera", "Extra inputs"]),
        ("cameras.front.topc", "x", ["cameras.front.topc", "Extra inputs"]),
        ("cameras.front.rotate", 90, ["cameras.front.rotate", "0 or 180", "90"]),
        ("cameras.wrist", {"slot": "base_0_rgb"}, ["base_0_rgb", "more than one"]),
        ("absent_slots", ["base_0_rgb"], ["base_0_rgb", "absent"]),
        ("anchor", "side", ["anchor", "side", "front"]),
        ("state.dims", [{"name": "a", "unit": "radians"}], ["state.dims.0.unit", "radians"]),
        ("state.dims", [{"name": "a", "unit": "rad"}, {"name": "a", "unit": "rad"}], ["state", "twice", "a"]),
        ("state.dims", [{"name": "a", "unit": "rad", "source": "arm"}], ["arm", "joints"]),
        ("state.dims", [{"name": "a", "unit": "rad", "model_unit": "m"}], ["rad", "m", "model_range"]),
        ("state.dims", [{"name": "a", "unit": "rad", "range": [0, 1]}], ["range", "together"]),
        ("action.dims", [{"name": "a", "unit": "rad"}], ["action.dims.0.control", "required"]),
        ("action.dims", [{"name": "a", "unit": "rad", "control": "position", "limits": [1, -1]}], ["limits", "low"]),
        ("action.dims", [{"name": "a", "unit": "rad", "control": "gripper", "relative": True}], ["gripper"]),
        ("timing", {"rate_hz": 0}, ["timing.rate_hz", "greater than 0"]),
        ("timing", {"rate_hz": "50"}, ["timing.rate_hz", "number", "'50'"]),
        ("timing", {"horizon": 2.5}, ["timing.horizon", "integer", "2.5"]),
        ("timing", {"rate_hz": math.inf}, ["timing.rate_hz", "finite"]),
        ("reset_pose", [0.0, 1.0], ["reset_pose", "1 values", "2"]),
        ("adapt_to_pi", True, ["adapt_to_pi", "14"]),
        ("adapt_to_pi", "yes", ["adapt_to_pi", "boolean"]),
    ],
)
def test_mistakes_name_file_key_and_expectation(path: str, value: object, names: list[str]):
    with pytest.raises(ProfileError) as caught:
        parse_profile(changed(path, value), origin="arm.yaml")
    for name in ["arm.yaml", *names]:
        assert name in str(caught.value)


def test_two_sources_need_naming():
    content = changed("state.sources", {"left": {"topic": "l"}, "right": {"topic": "r"}})
    with pytest.raises(ProfileError, match="names no source"):
        parse_profile(content, origin="arm.yaml")


def test_unknown_name_lists_the_shipped_ones():
    with pytest.raises(ProfileError, match="so101"):
        load_profile("so100_misspelt")


def test_broken_yaml_names_the_file(tmp_path: Path):
    broken = tmp_path / "broken.yaml"
    broken.write_text("name: [", encoding="utf-8")
    with pytest.raises(ProfileError, match="broken.yaml"):
        load_profile(broken)
    broken.write_text("- a list", encoding="utf-8")
    with pytest.raises(ProfileError, match="mapping"):
        load_profile(broken)


def test_own_file_loads(tmp_path: Path):
    own = tmp_path / "arm.yaml"
    own.write_text(yaml.safe_dump(MINIMAL), encoding="utf-8")
    assert load_profile(own).state.dims[0].joint_name == "a"


def test_units_convert():
    gripper = load_profile("so101").state.dims[5]
    scale, offset = gripper.to_model()
    assert scale * gripper.range[0] + offset == pytest.approx(0.0)  # type: ignore[index]
    assert scale * gripper.range[1] + offset == pytest.approx(100.0)  # type: ignore[index]
    scale, offset = load_profile("so101").state.dims[0].to_model()
    assert (scale * math.pi + offset) == pytest.approx(180.0)
