"""Units, ALOHA's conventions and relative actions, each with its inverse."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pi05_ros.errors import ContractError, ProfileError
from pi05_ros.profile import AlohaGripper, load_profile, parse_profile
from pi05_ros.transforms.robots import (
    AlohaConvention,
    DimensionConversions,
    StateActionConvention,
    absolute_to_delta,
    delta_to_absolute,
)

GOLDEN = json.loads((Path(__file__).parent / "golden" / "preproc_golden.json").read_text())
DELTA = {key: np.array(value) for key, value in GOLDEN["delta"].items()}
ALOHA = {key: np.array(value) for key, value in GOLDEN["aloha_adapt_to_pi"].items()}

vectors14 = hnp.arrays(np.float64, 14, elements=st.floats(-3.2, 3.2))
chunks14 = hnp.arrays(np.float64, (5, 14), elements=st.floats(-3.2, 3.2))


def test_delta_and_absolute_equal_openpis() -> None:
    actions, state, mask = DELTA["actions"], DELTA["state"], DELTA["mask"]
    assert np.array_equal(absolute_to_delta(actions, state, mask), DELTA["delta"])
    assert np.array_equal(delta_to_absolute(actions, state, mask), DELTA["absolute"])


@given(chunks14, vectors14, hnp.arrays(bool, 14))
def test_delta_there_and_back_leaves_absolute_dimensions_bit_for_bit(
    actions: np.ndarray, state: np.ndarray, mask: np.ndarray
) -> None:
    before = actions.copy()
    absolute = delta_to_absolute(actions, state, mask)
    assert np.array_equal(absolute[:, ~mask], actions[:, ~mask])
    assert np.allclose(absolute_to_delta(absolute, state, mask), actions, atol=1e-14, rtol=0)
    assert np.array_equal(actions, before)


def test_a_leftover_chunk_is_re_expressed_against_the_new_state() -> None:
    mask = np.array([True, False])
    absolute = delta_to_absolute(np.array([[0.1, 0.5], [0.2, 0.5]]), np.array([1.0, 9.0]), mask)
    moved = absolute_to_delta(absolute, np.array([1.1, 3.0]), mask)
    assert np.allclose(moved, [[0.0, 0.5], [0.1, 0.5]])


def test_relative_actions_keep_their_dtype_and_pass_wider_dimensions() -> None:
    actions = np.zeros((2, 4, 5), dtype=np.float32)
    state = np.arange(6, dtype=np.float64).reshape(2, 3)
    out = delta_to_absolute(actions, state, np.array([True, False, True]))
    assert out.dtype == np.float32
    assert out[1].tolist() == [[3.0, 0.0, 5.0, 0.0, 0.0]] * 4
    # The gripper (last, absolute) needs no state.
    assert delta_to_absolute(actions[0], state[0], np.array([True, True, True, False])).shape == (4, 5)


@pytest.mark.parametrize(("action_width", "state_width"), [(2, 3), (3, 2)])
def test_relative_actions_refuse_other_widths(action_width: int, state_width: int) -> None:
    with pytest.raises(ContractError, match=rf"\[4, {action_width}\] and \[{state_width}\]"):
        delta_to_absolute(np.zeros((4, action_width)), np.zeros(state_width), np.ones(3, dtype=bool))


def test_aloha_equals_openpis_adapt_to_pi() -> None:
    aloha = AlohaConvention()
    assert np.array_equal(aloha.state_to_model(ALOHA["state"]), ALOHA["decoded_state"])
    assert np.array_equal(aloha.actions_to_robot(ALOHA["actions"]), ALOHA["encoded_actions"])


@given(vectors14, hnp.arrays(np.float64, 2, elements=st.floats(0, 1)))
def test_aloha_state_there_and_back(state: np.ndarray, grippers: np.ndarray) -> None:
    state[[6, 13]] = grippers
    aloha = AlohaConvention()
    assert np.allclose(aloha.state_to_robot(aloha.state_to_model(state)), state, atol=1e-9)


@given(chunks14)
def test_aloha_actions_there_and_back(actions: np.ndarray) -> None:
    aloha = AlohaConvention()
    assert np.allclose(aloha.actions_to_model(aloha.actions_to_robot(actions)), actions, atol=1e-12)


def test_aloha_changes_exactly_four_signs() -> None:
    ones = np.ones((1, 14))
    flipped = np.flatnonzero(AlohaConvention().actions_to_robot(ones)[0] == -1.0)
    assert flipped.tolist() == [1, 2, 8, 9]


def test_aloha_gripper_opens_without_a_plateau() -> None:
    states = np.linspace(0, 1, 101)[:, None].repeat(14, axis=1)
    opening = AlohaConvention().state_to_model(states)[:, [6, 13]]
    assert (np.diff(opening, axis=0) > 0).all()  # the arcsine is not cut off anywhere in the reported range


def test_another_gripper_has_other_constants() -> None:
    wide = AlohaConvention(AlohaGripper(linear_open=0.0570, joint_high=1.6))
    state, actions = np.full(14, 0.5), np.full((1, 14), 0.5)
    assert (wide.state_to_model(state) != AlohaConvention().state_to_model(state)).nonzero()[0].tolist() == [6, 13]
    assert np.allclose(wide.state_to_robot(wide.state_to_model(state)), state)
    assert np.allclose(wide.actions_to_model(wide.actions_to_robot(actions)), actions)


def aloha(**changes: object) -> StateActionConvention:
    content = {**load_profile("aloha").model_dump(mode="json"), **changes}
    return StateActionConvention.from_profile(parse_profile(content, "own.yaml"), np.zeros(14, dtype=bool))


def test_a_profile_gives_its_grippers_constants() -> None:
    state, actions = np.full(14, 0.5), np.full((1, 14), 0.5)
    usual, off = aloha(), aloha(adapt_to_pi=False)
    assert np.array_equal(usual.state_to_model(state), AlohaConvention().state_to_model(state))
    assert np.array_equal(off.state_to_model(state), state)
    # Each constant alone changes the grippers' numbers, and nothing but them.
    for name, number in {
        "linear_closed": 0.02, "linear_open": 0.057, "arm_length": 0.037, "horn_radius": 0.0215,
        "pi_angle_closed": 0.6, "pi_angle_open": 1.7, "joint_low": -0.6, "joint_high": 1.6,
    }.items():  # fmt: skip
        own = aloha(aloha_gripper={name: number})
        states = (own.state_to_model(state), usual.state_to_model(state))
        answers = (own.actions_to_robot(actions, state)[0], usual.actions_to_robot(actions, state)[0])
        changed = {*np.flatnonzero(states[0] != states[1]), *np.flatnonzero(answers[0] != answers[1])}
        assert changed == {6, 13}, name
        model = own.actions_to_model(own.actions_to_robot(actions, state), state)
        assert np.allclose(model, actions)


def test_a_commanded_gripper_lies_between_the_joints_ends() -> None:
    # By hand: the model's 0.5 is 0.5 + 0.6 rad of the joint, which goes from -0.4 to 1.6.
    own = aloha(aloha_gripper={"pi_angle_closed": 0.6, "joint_low": -0.4, "joint_high": 1.6})
    assert np.allclose(own.actions_to_robot(np.full((1, 14), 0.5), np.zeros(14))[0, [6, 13]], (1.1 + 0.4) / 2.0)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"aloha_gripper": {"joint_low": 1.4910}}, ["aloha_gripper", "joint_low and joint_high", "two different"]),
        ({"aloha_gripper": {"linear_closed": 0.0}}, ["aloha_gripper.linear_closed", "greater than 0"]),
        ({"aloha_gripper": {"linear": 1.0}}, ["aloha_gripper.linear", "Extra"]),
        ({"aloha_gripper": {}, "adapt_to_pi": False}, ["aloha_gripper", "adapt_to_pi"]),
    ],
)
def test_a_gripper_that_cannot_be_is_refused(changes: dict, said: list[str]) -> None:
    with pytest.raises(ProfileError) as caught:
        aloha(**changes)
    for part in ["own.yaml", *said]:
        assert part in str(caught.value)


def test_aloha_refuses_other_widths() -> None:
    with pytest.raises(ContractError, match=r"14 dimensions, got values of shape \[7\]"):
        AlohaConvention().state_to_model(np.zeros(7))


affine = st.tuples(st.floats(0.01, 100) | st.floats(-100, -0.01), st.floats(-10, 10))


@given(st.lists(affine, min_size=1, max_size=8), st.data())
def test_unit_conversions_there_and_back(conversions: list[tuple[float, float]], data: st.DataObject) -> None:
    units = DimensionConversions(conversions)
    values = data.draw(hnp.arrays(np.float64, (3, len(conversions)), elements=st.floats(-10, 10)))
    assert np.allclose(units.to_robot(units.to_model(values)), values, atol=1e-10)


def test_degrees_and_gripper_ranges() -> None:
    units = DimensionConversions([(180 / np.pi, 0.0), (-100.0, 100.0)])  # rad -> deg; 0 open .. 1 closed -> 100 .. 0
    assert np.allclose(units.to_model(np.array([np.pi / 2, 0.25])), [90.0, 75.0])
    assert np.allclose(units.to_robot(np.array([[-180.0, 100.0]])), [[-np.pi, 0.0]])


def test_unit_conversions_keep_float32_and_refuse_what_cannot_be_inverted() -> None:
    units = DimensionConversions([(2.0, 0.0)])
    assert units.to_model(np.ones(1, dtype=np.float32)).dtype == np.float32
    assert units.to_model(np.ones(1, dtype=np.int64)).dtype == np.float64
    with pytest.raises(ProfileError, match=r"\[1\]"):
        DimensionConversions([(1.0, 0.0), (0.0, 1.0)])
    with pytest.raises(ContractError, match=r"cover 1 dimensions, got values of shape \[3\]"):
        units.to_model(np.zeros(3))


def so101(**extra: object) -> dict:
    arm = {"unit": "rad", "model_unit": "deg"}
    gripper = {"unit": "rad", "model_unit": "percent", "range": [-0.17, 1.75], "model_range": [0.0, 100.0]}
    return {
        "name": "arm",
        "cameras": {"front": {"slot": "front"}},
        "state": {"dims": [{"name": "pan", **arm}, {"name": "jaw", **gripper}]},
        "action": {
            "dims": [{"name": "pan", "control": "position", **arm}, {"name": "jaw", "control": "gripper", **gripper}]
        },
        **extra,
    }


def test_a_profiles_units_are_converted_both_ways() -> None:
    profile = parse_profile(so101(), origin="test")
    convention = StateActionConvention.from_profile(profile, np.array([True, False]))
    state = convention.state_to_model(np.array([np.pi / 6, 1.75]))
    assert np.allclose(state, [30.0, 100.0])
    actions = convention.actions_to_robot(np.array([[15.0, 0.0], [0.0, 50.0]]), state)
    assert np.allclose(actions, [[np.pi / 4, -0.17], [np.pi / 6, 0.79]])
    assert np.allclose(convention.actions_to_model(actions, state), [[15.0, 0.0], [0.0, 50.0]])


def test_without_conversions_numbers_pass_bit_for_bit() -> None:
    convention = StateActionConvention()
    state = np.array([-0.0, 1e-300, 0.1])
    out = convention.state_to_model(state)
    assert out.tobytes() == state.tobytes() and out is not state
    actions = np.array([[0.1, 0.2, 0.3]], dtype=np.float32)
    assert convention.actions_to_robot(actions, state).tobytes() == actions.tobytes()


@given(vectors14, chunks14)
def test_aloha_with_relative_joints_there_and_back(state: np.ndarray, actions: np.ndarray) -> None:
    state[[6, 13]] = 0.5
    mask = np.array([True] * 6 + [False] + [True] * 6 + [False])
    for aloha in (AlohaConvention(), None):
        convention = StateActionConvention(aloha=aloha, relative=mask)
        model_state = convention.state_to_model(state)
        robot = convention.actions_to_robot(actions, model_state)
        assert np.allclose(convention.actions_to_model(robot, model_state), actions, atol=1e-12)
        # A model that says "do not move" leaves every joint where the robot reported it, whatever its sign.
        still = convention.actions_to_robot(np.zeros((1, 14)), model_state)[0]
        assert np.allclose(still[mask], state[mask], atol=1e-12)
