"""Clients' keys to observations: every robot family, generic names, every image form, and refusals that name keys."""

from __future__ import annotations

import base64
import io

import numpy as np
import pytest
from PIL import Image
from serving_stubs import facts, image, request_of

from pi05_ros.errors import ObservationError, RequestError
from pi05_ros.profile import load_profile
from pi05_ros.serving.observations import ObservationReader
from pi05_ros.serving.schema import RequestReader

PROFILES = ("aloha", "droid", "libero", "libero_openpi", "ur5e")


def gradient(height: int = 24, width: int = 32) -> np.ndarray:
    return np.arange(height * width * 3, dtype=np.uint32).astype(np.uint8).reshape(height, width, 3)


@pytest.mark.parametrize("profile", PROFILES)
def test_openpi_requests_of_every_family(profile: str) -> None:
    robot = load_profile(profile)
    got = ObservationReader(robot).read(request_of(profile, 3.0))
    required = {name for name, camera in robot.cameras.items() if camera.slot is not None}
    assert required <= set(got.images) <= set(robot.cameras)
    assert all(one.shape == (24, 32, 3) and one.dtype == np.uint8 for one in got.images.values())
    assert got.state.shape == (len(robot.state.dims),) and got.state[0] == 3.0
    assert isinstance(got.prompt, str)


@pytest.mark.parametrize("profile", PROFILES)
def test_generic_names_mean_the_same(profile: str) -> None:
    reader = ObservationReader(load_profile(profile))
    family = reader.read(request_of(profile, 1.0))
    for spell in ("observation.images.{}".format, "{}".format):
        generic = {spell(name): frame for name, frame in family.images.items()}
        got = reader.read({**generic, "observation.state": family.state, "task": family.prompt})
        assert set(got.images) == set(family.images)
        np.testing.assert_array_equal(got.state, family.state)
        assert got.prompt == family.prompt
    got = reader.read({"images": dict(family.images), "state": family.state, "prompt": family.prompt})
    for name, frame in family.images.items():
        np.testing.assert_array_equal(got.images[name], frame)


def test_parts_of_the_state_are_joined_in_order() -> None:
    request = request_of("droid")
    request["observation/joint_position"] = np.arange(7.0)
    request["observation/gripper_position"] = 0.5
    request["prompt"] = b"open the drawer"
    got = ObservationReader(load_profile("droid")).read(request)
    np.testing.assert_array_equal(got.state, [0, 1, 2, 3, 4, 5, 6, 0.5])
    assert got.prompt == "open the drawer"
    # Eight joints and no gripper would be as wide as seven and one.
    request["observation/joint_position"] = np.arange(8.0)
    request["observation/gripper_position"] = np.zeros(0)
    with pytest.raises(ObservationError, match="joint_position: 7 numbers"):
        ObservationReader(load_profile("droid")).read(request)


def test_precedence_dotted_over_nested_and_task_over_prompt() -> None:
    reader = ObservationReader(load_profile("droid"))
    request = {
        "images": {"exterior_image_1_left": image(1), "wrist_image_left": image(1)},
        "observation.images.wrist_image_left": image(2),
        "state": np.zeros(8),
        "task": "first",
        "prompt": "second",
    }
    got = reader.read(request)
    assert got.images["wrist_image_left"][0, 0, 0] == 2 and got.images["exterior_image_1_left"][0, 0, 0] == 1
    assert got.prompt == "first"
    with pytest.raises(ObservationError, match="given twice"):
        reader.read({**request, "wrist_image_left": image(3)})
    with pytest.raises(ObservationError, match="given twice"):
        reader.read({**request, "observation.state": np.zeros(8)})


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("other", PROFILES)
def test_requests_of_another_robot_are_refused_naming_both_sides(profile: str, other: str) -> None:
    if {profile, other} == {"libero", "libero_openpi"} or profile == other:
        return
    with pytest.raises(ObservationError) as caught:
        ObservationReader(load_profile(profile)).read(request_of(other))
    assert caught.value.code == "observation.keys"
    assert profile in caught.value.message
    assert caught.value.details["expected"] and caught.value.details["received"]


def test_missing_and_unknown_cameras_are_named() -> None:
    reader = ObservationReader(load_profile("aloha"))
    request = request_of("aloha")
    del request["images"]["cam_left_wrist"]
    request["images"]["cam_side"] = image()
    with pytest.raises(ObservationError) as caught:
        reader.read(request)
    assert "missing cameras ['cam_left_wrist']" in caught.value.message
    assert "images.cam_side" in caught.value.message
    request = request_of("aloha")
    del request["images"]["cam_left_wrist"], request["state"]
    with pytest.raises(ObservationError, match="missing state"):
        reader.read(request)
    # The camera that feeds no slot may be missing.
    request = request_of("aloha")
    del request["images"]["cam_low"]
    reader.read(request)


def as_png(frame: np.ndarray) -> str:
    file = io.BytesIO()
    Image.fromarray(frame).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


@pytest.mark.parametrize(
    "spell",
    [
        lambda frame: frame,
        lambda frame: frame.transpose(2, 0, 1),
        lambda frame: frame.tolist(),
        lambda frame: frame.astype(np.int64),
        lambda frame: frame.astype(np.float32) / np.float32(255.0),
        lambda frame: (frame / 255.0).tolist(),
        lambda frame: {"values": frame.tolist(), "dtype": "uint8", "shape": list(frame.shape)},
        lambda frame: {"data": frame.reshape(-1).tolist(), "shape": list(frame.shape)},
        lambda frame: {"data": frame.tobytes(), "dtype": "uint8", "shape": list(frame.shape)},
        lambda frame: {"b64_json": as_png(frame)},
        lambda frame: {"base64": "data:image/png;base64," + as_png(frame)},
    ],
)  # fmt: skip
def test_every_form_of_an_image_gives_the_same_bytes(spell) -> None:
    frame = gradient()
    request = request_of("droid")
    request["observation/wrist_image_left"] = spell(frame)
    got = ObservationReader(load_profile("droid")).read(request).images["wrist_image_left"]
    np.testing.assert_array_equal(got, frame)


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (np.zeros((24, 32), np.uint8), "image_layout"),
        (np.zeros((24, 32, 4), np.uint8), "image_layout"),
        (np.zeros((1, 24, 32, 3), np.uint8), "image_layout"),
        (np.zeros((0, 32, 3), np.uint8), "image_empty"),
        (np.full((24, 32, 3), 200.0), "image_range"),
        (np.full((24, 32, 3), -0.1), "image_range"),
        (np.full((24, 32, 3), np.nan), "image_not_finite"),
        (np.full((24, 32, 3), 256), "image_range"),
        (np.full((24, 32, 3), -1), "image_range"),
        (np.zeros((24, 32, 3), bool), "numbers"),
        (np.zeros((24, 32, 3), np.complex64), "numbers"),
        ([[[1, 2, 3], [4, 5]]], "numbers"),
        ("text", "numbers"),
        (None, "numbers"),
        (b"\xff\xd8\xff", "numbers"),
        ({"base64": "not base64!"}, "image_encoding"),
        ({"base64": ""}, "image_corrupt"),
        ({"base64": base64.b64encode(b"\xff\xd8\xff\xe0" + bytes(20)).decode()}, "image_corrupt"),
        ({"base64": 3}, "image_encoding"),
        ({"base64": "data:image/png,xx"}, "image_encoding"),
        ({"values": [1, 2, 3], "shape": [2, 2]}, "numbers"),
        ({"values": [1, 2, 300], "dtype": "uint8"}, "numbers"),
        ({"values": [1], "dtype": "object"}, "numbers"),
        ({"values": {"values": [1]}}, "numbers"),
        ({"data": b"abc", "dtype": "float32"}, "numbers"),
        ({"pixels": 1}, "numbers"),
    ],
)  # fmt: skip
def test_images_that_cannot_be_read_are_refused_naming_the_key(value: object, code: str) -> None:
    request = request_of("droid")
    request["observation/wrist_image_left"] = value
    with pytest.raises(ObservationError) as caught:
        ObservationReader(load_profile("droid")).read(request)
    assert caught.value.code == f"observation.{code}"
    assert "observation/wrist_image_left" in caught.value.message


def test_image_bombs_are_refused_before_they_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.BytesIO()
    Image.new("RGB", (5000, 5000)).save(file, "PNG")
    monkeypatch.setattr(Image.Image, "convert", lambda *_: pytest.fail("decoded"))
    request = request_of("droid")
    request["observation/wrist_image_left"] = {"base64": base64.b64encode(file.getvalue()).decode()}
    with pytest.raises(ObservationError) as caught:
        ObservationReader(load_profile("droid")).read(request)
    assert caught.value.code == "observation.image_size"


def test_grey_pictures_are_refused() -> None:
    request = request_of("droid")
    request["observation/wrist_image_left"] = {"base64": as_png(np.zeros((8, 8), np.uint8))}
    with pytest.raises(ObservationError, match="colour"):
        ObservationReader(load_profile("droid")).read(request)


@pytest.mark.parametrize("state", [None, "x", [[0.0] * 8], [True] * 8, {"a": 1}, ["1"] * 8, 3.0])
def test_states_that_are_no_numbers_are_refused(state: object) -> None:
    request = {**request_of("droid"), "state": state}
    del request["observation/joint_position"], request["observation/gripper_position"]
    with pytest.raises(ObservationError, match="state"):
        ObservationReader(load_profile("droid")).read(request)


@pytest.mark.parametrize("prompt", [3, ["x"], b"\xff\xfe", "x" * 10_001, {"text": "x"}])
def test_prompts_that_are_no_text_are_refused(prompt: object) -> None:
    with pytest.raises(ObservationError, match="prompt"):
        ObservationReader(load_profile("droid")).read({**request_of("droid"), "prompt": prompt})


def generation(**changes: object) -> dict:
    observation = {
        "images": {"exterior_image_1_left": image(), "wrist_image_left": image()},
        "state": [0.0] * 8,
    }
    return {"input": {"task": "open", "observation": observation}, **changes}


def test_a_generation_request_is_read() -> None:
    reader = RequestReader(facts("droid"))
    ask = reader.read(
        generation(
            id="abc",
            model="lerobot/pi05_base",
            parameters={"num_inference_steps": 5, "action_horizon": 3, "action_dim": 32, "seed": 2**64 - 1}
            | {"num_candidates": 2},
            runtime={"timeout_ms": 250, "prefix_cache": False, "response_format": "raw", "return_timing": False},
        )
    )  # fmt: skip
    assert (ask.request_id, ask.horizon, ask.timeout_s) == ("abc", 3, 0.25)
    assert [one.seed for one in ask.options] == [2**64 - 1, 0] and ask.options[0].num_steps == 5
    assert ask.response_format == "raw" and not ask.return_timing and ask.how == {}
    defaults = reader.read(generation())
    assert defaults.options[0].num_steps == 10 and defaults.options[0].seed is None
    assert (defaults.horizon, defaults.timeout_s, defaults.request_id) == (8, None, None)
    assert defaults.group != ask.group


def test_spaces_masks_and_noise_are_passed_on() -> None:
    request = generation(runtime={"action_space": "normalized", "state_space": "normalized"})
    request["input"]["observation"] |= {"noise": np.zeros((1, 8, 32)), "image_masks": {"wrist_image_left": False}}
    del request["input"]["observation"]["images"]["wrist_image_left"]
    ask = RequestReader(facts("droid")).read(request)
    assert ask.how == {
        "action_space": "normalized",
        "state_space": "normalized",
        "image_masks": {"wrist_image_left": False},
    }
    assert ask.options[0].noise.shape == (1, 8, 32) and ask.options[0].noise.dtype == np.float32


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"parameters": {"num_inference_steps": 0}}, "num_inference_steps"),
        ({"parameters": {"num_inference_steps": 10**9}}, "num_inference_steps"),
        ({"parameters": {"num_inference_steps": True}}, "num_inference_steps"),
        ({"parameters": {"num_inference_steps": "5"}}, "num_inference_steps"),
        ({"parameters": {"action_horizon": 9}}, "1 to 8 rows"),
        ({"parameters": {"action_dim": 7}}, "action_dim"),
        ({"parameters": {"seed": -1}}, "seed"),
        ({"parameters": {"seed": 2**64}}, "seed"),
        ({"parameters": {"num_candidates": 0}}, "num_candidates"),
        ({"parameters": {"temperature": 1}}, "temperature"),
        ({"runtime": {"timeout_ms": float("nan")}}, "timeout_ms"),
        ({"runtime": {"prefix_cache": "yes"}}, "prefix_cache"),
        ({"runtime": {"response_format": "xml"}}, "response_format"),
        ({"runtime": 3}, "runtime"),
        ({"input": []}, "input"),
        ({"input": {}}, "input.observation"),
        ({"id": 1.5}, "id"),
        ({"stream": True}, "stream"),
    ],
)  # fmt: skip
def test_malformed_requests_name_the_field(change: dict, said: str) -> None:
    with pytest.raises(ObservationError, match=said):
        RequestReader(facts("droid")).read(generation(**change))


def test_a_model_that_is_not_served_is_named() -> None:
    with pytest.raises(RequestError) as caught:
        RequestReader(facts("droid")).read(generation(model="other/model"))
    assert caught.value.code == "request.unknown_model" and "stub/checkpoint" in caught.value.message


def test_controls_beside_a_raw_observation() -> None:
    reader = RequestReader(facts("aloha"))
    ask = reader.read(
        {
            **request_of("aloha"),
            "enable_prefix_cache": False,
            "num_inference_steps": 4,
            "noise": np.zeros((8, 32), np.float32),
            "request_id": 7,
            "timeout_ms": 100,
        }
    )
    assert ask.options[0].num_steps == 4 and ask.request_id == 7 and ask.timeout_s == 0.1
    assert ask.prefix_cache is False
    with pytest.raises(ObservationError, match="enable_prefix_cache"):
        reader.read({**request_of("aloha"), "enable_prefix_cache": "maybe"})
    for body in (None, [], "x", 3):
        with pytest.raises(ObservationError, match="map of keys"):
            reader.read(body)
