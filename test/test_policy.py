"""The Python API end to end: real checkpoint formats in, robot units out, against the references' whole pipelines."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoint_folders import LIBERO, TINY
from golden_data import HUB_STYLE_TINY, read_json, tensors

import pi05_ros
from pi05_ros import Observation, Policy, load_policy
from pi05_ros.checkpoint.make import RobotSide, random_statistics, write_lerobot
from pi05_ros.errors import ActionError, CheckpointError, ConfigurationError, ContractError, ObservationError
from pi05_ros.profile import Profile, load_profile, parse_profile
from pi05_ros.transforms.tokenizer import PromptReport


class GoldenTokenizer:
    """Stands in for Gemma's gated tokenizer: checks the prompt's text, answers with the reference's ids."""

    def __init__(self, text: str, ids: torch.Tensor, mask: torch.Tensor) -> None:
        self.text, self.ids, self.mask = text, ids, mask

    def encode_prompt(
        self, task: str, bins: list[int] | None, max_length: int
    ) -> tuple[torch.Tensor, torch.Tensor, PromptReport]:
        from pi05_ros.transforms.prompt import format_prompt

        assert format_prompt(task, bins) == self.text
        assert max_length == len(self.ids)
        return self.ids, self.mask, PromptReport(self.text, int(self.mask.sum()), 0)


def with_golden_tokens(policy: Policy, ids: torch.Tensor, mask: torch.Tensor) -> Policy:
    policy.tokenizer = GoldenTokenizer(read_json("lerobot_e2e.json")["prompt"][0], ids, mask)  # type: ignore[assignment]
    return policy


def test_lerobots_whole_pipeline():
    golden = tensors("lerobot_e2e")
    policy = load_policy(HUB_STYLE_TINY, profile="libero")
    with_golden_tokens(policy, golden["tokens.tiny_ids"][0], golden["token_mask"][0])
    chunk = policy.infer(
        Observation(
            images={"image": golden["raw.image"].numpy(), "image2": golden["raw.image2"].numpy()},
            state=golden["raw.state"].numpy(),
            prompt=read_json("lerobot_e2e.json")["task"],
        ),
        noise=golden["noise"].numpy(),
    )
    wanted = golden["actions.unnormalized"][0].numpy()
    assert chunk.actions.shape == (50, 7) and chunk.actions.dtype == np.float32
    assert np.abs(chunk.actions - wanted).max() <= 2e-5
    assert chunk.noise_seed is None and chunk.denoise_steps == 10 and chunk.executed_steps == 10
    stages = list(chunk.timings_ms)
    assert (stages[0], stages[-1]) == ("preprocess", "postprocess")


def test_lerobots_normalized_actions():
    golden = tensors("lerobot_e2e")
    policy = load_policy(HUB_STYLE_TINY)
    with_golden_tokens(policy, golden["tokens.tiny_ids"][0], golden["token_mask"][0])
    observation = Observation(
        images={"image": golden["raw.image"].numpy(), "image2": golden["raw.image2"].numpy()},
        state=golden["norm.state"][0].numpy(),
        prompt=read_json("lerobot_e2e.json")["task"],
    )
    prepared = policy.prepare(observation, action_space="normalized", state_space="normalized")
    options = pi05_ros.policy.InferenceOptions(noise=golden["noise"].numpy())
    chunk = policy.finish(prepared, policy.run([prepared], [options])[0])
    assert np.abs(chunk.actions - golden["actions.normalized"][0].numpy()).max() <= 2e-5
    assert set(chunk.units) == {"normalized"}


@pytest.fixture
def openpi_tiny(tmp_path: Path) -> Path:
    """The golden weights as an OpenPI folder with OpenPI's statistics."""
    folder = tmp_path / "pi05_tiny"
    shutil.copytree(HUB_STYLE_TINY.parent / "openpi_assets", folder / "assets")
    shutil.copy(HUB_STYLE_TINY / "model.safetensors", folder)
    architecture = json.loads((HUB_STYLE_TINY / "config.json").read_text())["architecture"]
    config = {"action_dim": 32, "action_horizon": 50, "precision": "float32", "architecture": architecture}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def libero_like(**model: object) -> Profile:
    """LIBERO's cameras and widths for a checkpoint that was trained with the state in the prompt."""
    content = load_profile("libero_openpi").model_dump(mode="json")
    content["timing"] = {}
    content["model"] = model
    return parse_profile(content, "libero_like")


def test_openpis_whole_pipeline(openpi_tiny: Path):
    inputs, golden = tensors("lerobot_e2e"), tensors("openpi_e2e")
    policy = load_policy(openpi_tiny, profile=libero_like(state_in_prompt=True, normalization="quantile"))
    with_golden_tokens(policy, golden["tokens.tiny_ids"], inputs["token_mask"][0])
    chunk = policy.infer(
        Observation(
            images={"image": inputs["raw.image"].numpy(), "wrist_image": inputs["raw.image2"].numpy()},
            state=inputs["raw.state"].numpy(),
            prompt=read_json("lerobot_e2e.json")["task"],
        ),
        noise=inputs["noise"].numpy(),
    )
    # 2e-4: the reference accumulates its flow times in float32.
    assert np.abs(chunk.actions - golden["actions"].numpy()).max() <= 2e-4


def photo(seed: int, shape: tuple[int, int] = (48, 64)) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (*shape, 3), dtype=np.uint8)


def base_observation(width: int = 32) -> Observation:
    cameras = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")
    state = np.linspace(-0.9, 0.9, width, dtype=np.float32)
    return Observation({name: photo(index) for index, name in enumerate(cameras)}, state, "pick up the block")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As the public base checkpoint: three cameras, 32 wide, no statistics."""
    return write_lerobot(tmp_path_factory.mktemp("base") / "pi05_base", TINY, RobotSide())


def test_base_under_raw(base: Path):
    policy = load_policy(base)
    chunk = policy.infer(base_observation(), seed=7)
    assert chunk.actions.shape == (50, 32) and policy.profile.name == "raw"
    assert set(chunk.units) == {"normalized"} and chunk.noise_seed == 7 and chunk.step_time_s is None
    again = load_policy(base, profile="raw").infer(base_observation(), seed=7)
    assert np.array_equal(chunk.actions, again.actions)
    assert not np.array_equal(chunk.actions, policy.infer(base_observation(), seed=8).actions)


def test_only_real_state_dimensions_enter_the_prompt(base: Path):
    policy = load_policy(base)
    assert policy.tokenizer is not None
    lengths = [int(policy.prepare(base_observation(width)).inputs.token_mask.sum()) for width in (8, 14, 32)]
    assert lengths[0] < lengths[1] < lengths[2]
    with pytest.raises(ObservationError, match="1 to 32 numbers expected"):
        policy.prepare(base_observation(33))


def test_checkpoints_trained_with_a_padded_state_are_switched_to(demo: Policy):
    content = demo.profile.model_dump(mode="json")
    content["model"]["padded_state"] = True
    padded = load_policy(profile=parse_profile(content, "padded"))
    tokens = [int(policy.prepare(demo_observation()).inputs.token_mask.sum()) for policy in (demo, padded)]
    assert tokens[1] > tokens[0] + 25, "25 more numbers stand in the prompt"


def test_base_with_a_robot_needs_statistics(base: Path, tmp_path: Path):
    robot = three_cameras(32)
    with pytest.raises(ContractError, match="carries none.*normalization: none") as caught:
        load_policy(base, profile=robot)
    assert caught.value.code == "contract.no_statistics"
    assert load_policy(base, profile=robot, normalization="none").infer(base_observation(), seed=1).horizon == 50
    stats = {
        key: {name: values.tolist() for name, values in (("q01", s.q01), ("q99", s.q99))}
        for key, s in (("observation.state", random_statistics(32, 1)), ("action", random_statistics(32, 2)))
    }
    file = tmp_path / "stats.json"
    file.write_text(json.dumps(stats))
    chunk = load_policy(base, profile=robot, statistics=file).infer(base_observation(), seed=1)
    assert set(chunk.units) == {"rad"}


def three_cameras(width: int, action: dict | None = None) -> Profile:
    names = [f"joint_{index}" for index in range(width)]
    return parse_profile(
        {
            "name": "wide",
            "cameras": {slot: {"slot": slot} for slot in ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")},
            "state": {"dims": [{"name": name, "unit": "rad"} for name in names]},
            "action": {
                "dims": [{"name": name, "unit": "rad", "control": "position", **(action or {})} for name in names]
            },
            "timing": {"rate_hz": 20},
        },
        "wide.yaml",
    )


def test_libero_of_lerobot(tmp_path: Path):
    """Two cameras and an empty one, 8 in, 7 out."""
    policy = load_policy(write_lerobot(tmp_path / "pi05_libero", TINY, LIBERO), profile="libero")
    observation = Observation({"image": photo(1), "image2": photo(2)}, np.zeros(8), "put the bowl on the plate")
    chunk = policy.infer(observation, seed=1)
    assert chunk.actions.shape == (50, 7) and chunk.executed_steps == 10
    assert chunk.names[-1] == "gripper" and chunk.control_modes == ("delta_pose",) * 6 + ("gripper",)
    masks = policy.prepare(observation).inputs.image_masks
    assert masks == (True, True, False)


def test_built_in_checkpoint_for_the_demo_robot():
    policy = load_policy(profile="demo")
    observation = Observation(
        {camera: photo(index, (480, 640)) for index, camera in enumerate(policy.profile.cameras)}, np.zeros(7)
    )
    chunk = policy.infer(observation, seed=2**64 - 1)
    assert chunk.prompt == policy.profile.prompt and chunk.step_time_s == pytest.approx(0.04)
    assert np.abs(chunk.actions[:, :6]).max() < np.pi and chunk.clamp_count == 0 and chunk.guard_flags == ()


@pytest.fixture(scope="module")
def demo() -> Policy:
    return load_policy(profile="demo")


def demo_observation(**changed: object) -> Observation:
    content: dict = {
        "images": {camera: photo(index) for index, camera in enumerate(("base", "left_wrist", "right_wrist"))},
        "state": np.zeros(7),
        "prompt": "pick up the block",
    }
    return Observation(**{**content, **changed})


@pytest.mark.parametrize(
    ("changed", "code", "names"),
    [
        ({"images": {"base": photo(1), "left_wrist": photo(2)}}, "camera", ["right_wrist", "missing"]),
        ({"images": {**demo_observation().images, "side": photo(3)}}, "camera", ["side", "unknown"]),
        ({"images": {**demo_observation().images, "base": photo(1)[..., 0]}}, "image_layout", ["base", "48"]),
        ({"images": {**demo_observation().images, "base": photo(1) / 255.0}}, "image_dtype", ["base", "float64"]),
        ({"state": np.zeros(6)}, "state_width", ["joint_1", "gripper", "[6]"]),
        ({"state": np.zeros((1, 7))}, "state_width", ["[1, 7]"]),
        ({"state": np.array(["a"] * 7)}, "state_width", ["<U1"]),
        ({"state": np.array([0, 0, np.nan, 0, 0, 0, 0])}, "nan", ["joint_3"]),
        ({"state": np.array([0, 0, 0, 0, 0, 0, np.inf])}, "inf", ["gripper"]),
        ({"state": np.array([1e300, 0, 0, 0, 0, 0, 0])}, "inf", ["joint_1"]),
        ({"prompt": "  "}, "no_prompt", ["instruction"]),
        ({"prompt": 3}, "no_prompt", ["3"]),
    ],
)
def test_bad_observations_are_refused_and_the_next_one_works(demo: Policy, changed: dict, code: str, names: list[str]):
    with pytest.raises(ObservationError) as caught:
        demo.infer(demo_observation(**changed))
    assert caught.value.code == f"observation.{code}"
    for name in names:
        assert name in str(caught.value)
    assert demo.infer(demo_observation(), seed=1).horizon == 50


@pytest.mark.parametrize(
    ("asked", "names"),
    [
        ({"noise": np.zeros((10, 32))}, ["[50, 32]", "[10, 32]"]),
        ({"noise": np.full((50, 32), np.nan)}, ["finite"]),
        ({"seed": -1}, ["seed", "-1"]),
        ({"seed": 2**64}, ["seed"]),
        ({"seed": 1.5}, ["seed", "1.5"]),
        ({"num_steps": 0}, ["num_steps", "0"]),
        ({"num_steps": True}, ["num_steps", "True"]),
    ],
)
def test_bad_options_are_refused(demo: Policy, asked: dict, names: list[str]):
    with pytest.raises(ObservationError) as caught:
        demo.infer(demo_observation(), **asked)
    for name in names:
        assert name in str(caught.value)


def test_noise_is_what_the_seed_draws(demo: Policy):
    noise = torch.randn(50, 32, generator=torch.Generator().manual_seed(5)).numpy()
    by_noise = demo.infer(demo_observation(), noise=noise)
    by_seed = demo.infer(demo_observation(), seed=5)
    assert np.array_equal(by_noise.actions, by_seed.actions)
    assert np.array_equal(demo.infer(demo_observation(), noise=noise[None]).actions, by_seed.actions)
    unseeded = demo.infer(demo_observation())
    assert unseeded.noise_seed is not None
    assert np.array_equal(demo.infer(demo_observation(), seed=unseeded.noise_seed).actions, unseeded.actions)


def test_state_and_actions_of_every_dtype_are_the_same_numbers(demo: Policy):
    state = np.array([0.1, -0.2, 0.3, -0.4, 0.5, -0.6, 0.7])
    double = demo.infer(demo_observation(state=state), seed=1)
    single = demo.infer(demo_observation(state=state.astype(np.float32)), seed=1)
    assert np.array_equal(double.actions, single.actions)


def test_not_finite_network_output_is_no_action(demo: Policy, monkeypatch: pytest.MonkeyPatch):
    for value, code in ((np.nan, "action.nan"), (np.inf, "action.inf"), (0.0, "action.zero")):
        run = type(demo).run

        def broken(self: Policy, members: list, options: list, value: float = value, run=run) -> list:
            results = run(self, members, options)
            return [replace(results[0], actions=torch.full((50, 32), value))]

        monkeypatch.setattr(type(demo), "run", broken)
        with pytest.raises(ActionError) as caught:
            demo.infer(demo_observation(), seed=1)
        assert caught.value.code == code
        monkeypatch.undo()


def test_pictures_of_an_inverted_camera_are_turned(demo: Policy):
    content = demo.profile.model_dump(mode="json")
    content["cameras"]["base"]["rotate"] = 180
    turned = load_policy(profile=parse_profile(content, "turned"))
    upright = demo_observation()
    images = {**upright.images, "base": np.ascontiguousarray(upright.images["base"][::-1, ::-1])}
    chunk = turned.infer(demo_observation(images=images), seed=1)
    assert np.array_equal(chunk.actions, demo.infer(upright, seed=1).actions)


def test_cameras_are_routed_by_name_not_by_order(demo: Policy):
    images = demo_observation().images
    reordered = dict(reversed(list(images.items())))
    first = demo.infer(demo_observation(), seed=1).actions
    assert np.array_equal(first, demo.infer(demo_observation(images=reordered), seed=1).actions)
    swapped = {**images, "base": images["left_wrist"], "left_wrist": images["base"]}
    assert not np.array_equal(first, demo.infer(demo_observation(images=swapped), seed=1).actions)


def test_limits_of_the_profile_clamp_and_count(demo: Policy):
    content = demo.profile.model_dump(mode="json")
    content["action"]["dims"][0]["limits"] = [-0.1, 0.1]
    limited = load_policy(profile=parse_profile(content, "limited"))
    chunk = limited.infer(demo_observation(), seed=1)
    free = demo.infer(demo_observation(), seed=1)
    assert np.abs(chunk.actions[:, 0]).max() <= np.float32(0.1)
    assert np.array_equal(chunk.actions[:, 1:], free.actions[:, 1:])
    assert chunk.clamp_count == int((np.abs(free.actions[:, 0]) > np.float32(0.1)).sum()) > 0
    assert chunk.guard_flags == ("limit.position:joint_1",)


def test_relative_actions_are_added_to_the_start_state(base: Path):
    state = base_observation().state
    policy = load_policy(base, profile=three_cameras(32, {"relative": True}), normalization="none")
    absolute = load_policy(base, profile=three_cameras(32), normalization="none")
    difference = policy.infer(base_observation(), seed=1).actions - absolute.infer(base_observation(), seed=1).actions
    assert np.abs(difference - state).max() < 1e-6


def test_long_prompt_keeps_its_state(demo: Policy):
    chunk = demo.infer(demo_observation(prompt="pick up the block " * 250), seed=1)
    assert chunk.guard_flags == ("prompt.shortened",)
    short = demo.infer(demo_observation(prompt="pick up the block " * 250, state=np.full(7, 0.3)), seed=1)
    assert not np.array_equal(chunk.actions, short.actions), "the state is still in the shortened prompt"


def test_loading_without_a_tokenizer(tmp_path: Path):
    folder = write_lerobot(tmp_path / "silent", TINY, RobotSide(), tokenizer=False)
    policy = load_policy(folder)
    with pytest.raises(CheckpointError, match="tokenizer.json"):
        policy.infer(base_observation())
    tokenizer = pi05_ros.paths.builtin_checkpoint() / "tokenizer.json"
    assert load_policy(folder, tokenizer=tokenizer).infer(base_observation(), seed=1).horizon == 50


@pytest.mark.parametrize("device", ["gpu", "cuda:99", "meta", "cpu:x"])
def test_unusable_devices_are_refused(device: str):
    with pytest.raises(ConfigurationError, match="device"):
        load_policy(device=device)


def test_unknown_dtype_is_refused():
    with pytest.raises(ConfigurationError, match="float16"):
        load_policy(dtype="float16")


def test_bfloat16_on_a_cpu_stays_close(demo: Policy):
    exact = demo.infer(demo_observation(), seed=1).actions
    rounded = load_policy(profile="demo", dtype="bfloat16").infer(demo_observation(), seed=1).actions
    assert 0 < np.abs(rounded - exact).mean() < 0.05


def test_a_group_answers_each_member_as_alone(demo: Policy):
    observations = [demo_observation(state=np.full(7, value)) for value in (0.0, 0.2, -0.3)]
    options = [pi05_ros.policy.InferenceOptions(seed=seed) for seed in (1, 2, 3)]
    prepared = [demo.prepare(one) for one in observations]
    grouped = [demo.finish(*pair) for pair in zip(prepared, demo.run(prepared, options), strict=True)]
    for one, seed, chunk in zip(observations, (1, 2, 3), grouped, strict=True):
        # Another batch size sums in another order.
        assert np.abs(chunk.actions - demo.infer(one, seed=seed).actions).max() <= 2e-5
