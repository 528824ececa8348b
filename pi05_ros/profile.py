"""The contract of one robot: cameras, state, actions, units and timing, read from a short YAML file.

A profile says what the robot's side means; the checkpoint says what the model's side means; `pi05_ros.contract` fits
the two together and refuses what does not fit.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from pi05_ros.errors import ProfileError
from pi05_ros.paths import config_dir

Unit = Literal["rad", "deg", "m", "mm", "rad/s", "m/s", "percent", "fraction", "normalized", "unitless"]
ControlMode = Literal["position", "velocity", "delta_position", "delta_pose", "gripper", "unspecified"]
# YAML has no tuples; everything else is taken strictly.
Range = Annotated[tuple[float, float], BeforeValidator(lambda pair: tuple(pair) if isinstance(pair, list) else pair)]
NonEmpty = Annotated[str, Field(min_length=1)]
# A value that begins so is a question that a draft of `pi05-ros profile new` leaves to its reader.
OPEN_QUESTION = "?:"


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Camera(_Section):
    """One camera of the robot.

    ``slot`` is the checkpoint's camera it feeds; ``null`` accepts the camera without using it.
    ``rotate`` turns the picture by 180 degrees before anything else (cameras mounted upside down).
    ``optional`` lets an observation come without it; the slot is then masked.
    """

    slot: NonEmpty | None
    topic: NonEmpty | None = None
    type: Literal["image", "compressed"] = "image"
    rotate: Literal[0, 180] = 0
    optional: bool = False


class StateSource(_Section):
    """One publisher of sensor_msgs/JointState."""

    topic: NonEmpty
    type: Literal["joint_state"] = "joint_state"


class _Dimension(_Section):
    """Units of one number.

    ``unit`` is what the robot's topics and clients speak, ``model_unit`` what the checkpoint was trained in (the same
    unless given). Radians and degrees convert by themselves; any other pair needs ``range`` and ``model_range``, which
    are mapped onto each other linearly.
    """

    name: NonEmpty
    unit: Unit
    model_unit: Unit | None = None
    range: Range | None = None
    model_range: Range | None = None

    @model_validator(mode="after")
    def _convertible(self) -> _Dimension:
        if (self.range is None) != (self.model_range is None):
            raise ValueError(f"{self.name}: range and model_range are given together or not at all")
        for label, pair in (("range", self.range), ("model_range", self.model_range)):
            if pair is not None and pair[0] == pair[1]:
                raise ValueError(f"{self.name}: {label} needs two different ends, got {list(pair)}")
        if self.range is None and {self.unit, self.model_unit or self.unit} not in ({self.unit}, {"rad", "deg"}):
            raise ValueError(
                f"{self.name}: {self.unit} does not convert to {self.model_unit} by itself; give range and model_range"
            )
        return self

    def to_model(self) -> tuple[float, float]:
        """(scale, offset) with ``model value = scale * robot value + offset``."""
        if self.range is not None and self.model_range is not None:
            (low, high), (model_low, model_high) = self.range, self.model_range
            scale = (model_high - model_low) / (high - low)
            return scale, model_low - scale * low
        if self.model_unit is None or self.model_unit == self.unit:
            return 1.0, 0.0
        degrees_per_radian = 57.29577951308232
        return (degrees_per_radian, 0.0) if self.unit == "rad" else (1.0 / degrees_per_radian, 0.0)


class StateDimension(_Dimension):
    """One dimension of the state: where it is read and what it means. ``joint`` is the name in the JointState."""

    joint: NonEmpty | None = None
    source: NonEmpty | None = None
    field: Literal["position", "velocity", "effort"] = "position"

    @property
    def joint_name(self) -> str:
        return self.joint or self.name


class ActionDimension(_Dimension):
    """One dimension of the action.

    ``relative``: inside the model this dimension is relative to the chunk's start state (the state dimension of the
    same index) and is made absolute on the way out; ``null`` follows the checkpoint.
    ``limits`` and ``max_velocity`` are in ``unit`` (per second); nothing is clamped unless they are given.
    """

    control: ControlMode
    relative: bool | None = None
    limits: Range | None = None
    max_velocity: Annotated[float, Field(gt=0)] | None = None

    @model_validator(mode="after")
    def _ordered(self) -> ActionDimension:
        if self.limits is not None and not self.limits[0] < self.limits[1]:
            raise ValueError(f"{self.name}: limits are [low, high] with low < high, got {list(self.limits)}")
        if self.control == "gripper" and self.relative:
            raise ValueError(f"{self.name}: a gripper is always absolute; relative: true is refused")
        return self


class StateSpec(_Section):
    """The state vector: its publishers and its dimensions in order.

    ``exact: false`` takes a narrower vector as it is; nothing is filled in for the rest.
    """

    exact: bool = True
    sources: dict[str, StateSource] = Field(default_factory=dict)
    dims: list[StateDimension]


class ActionSpec(_Section):
    """The action vector: its dimensions in order."""

    dims: list[ActionDimension]


class AlohaGripper(_Section):
    """Constants of an ALOHA gripper, by which ``adapt_to_pi`` converts it; another gripper has others.

    The defaults are OpenPI's (src/openpi/policies/aloha_policy.py), for the ViperX 300's gripper.

    Attributes:
        linear_closed, linear_open: gripper positions in metres for the reported 0 and 1.
        arm_length, horn_radius: the crank, in metres.
        pi_angle_closed, pi_angle_open: angles in rad that the model's 0 and 1 stand for (2405 and 3110 of 4096 counts
            with zero at 2048).
        joint_low, joint_high: angles in rad for the commanded 0 and 1.
    """

    linear_closed: Annotated[float, Field(gt=0)] = 0.01844
    linear_open: Annotated[float, Field(gt=0)] = 0.05800
    arm_length: Annotated[float, Field(gt=0)] = 0.036
    horn_radius: Annotated[float, Field(gt=0)] = 0.022
    pi_angle_closed: float = 0.5476
    pi_angle_open: float = 1.6296
    joint_low: float = -0.6213
    joint_high: float = 1.4910

    @model_validator(mode="after")
    def _opens(self) -> AlohaGripper:
        for low, high in (
            ("linear_closed", "linear_open"),
            ("pi_angle_closed", "pi_angle_open"),
            ("joint_low", "joint_high"),
        ):
            if getattr(self, low) == getattr(self, high):
                raise ValueError(f"{low} and {high}: two different ends expected, got {getattr(self, low)} twice")
        return self


class Timing(_Section):
    """``rate_hz`` is the training rate (step time = 1 / rate); ``horizon`` and ``executed_steps`` count rows.

    ``null`` follows the checkpoint; a rate stands in no checkpoint and is therefore the profile's alone.
    """

    rate_hz: Annotated[float, Field(gt=0)] | None = None
    horizon: Annotated[int, Field(gt=0)] | None = None
    executed_steps: Annotated[int, Field(gt=0)] | None = None


class Controller(_Section):
    """One controller and the action dimensions that it takes, in its own order.

    ``type``: ``joint_trajectory`` is trajectory_msgs/JointTrajectory (positions; one per chunk), ``multi_array`` is
    std_msgs/Float64MultiArray and ``joint_state`` is sensor_msgs/JointState, both at ``output.rate_hz``.
    ``control`` is what the controller does with the numbers; dimensions of another control mode are refused.
    ``joints`` are its names for the dimensions, where they are not those of the state dimensions of the same name.
    """

    type: Literal["joint_trajectory", "multi_array", "joint_state"]
    topic: NonEmpty
    control: Literal["position", "velocity"] = "position"
    dims: Annotated[list[NonEmpty], Field(min_length=1)]
    joints: list[NonEmpty] | None = None

    @model_validator(mode="after")
    def _carries(self) -> Controller:
        if self.type == "joint_trajectory" and self.control != "position":
            raise ValueError("a joint_trajectory carries positions; velocities go out as multi_array or joint_state")
        if self.joints is not None and len(self.joints) != len(self.dims):
            raise ValueError(f"joints: one for each of {self.dims} expected, got {self.joints}")
        return self


class Output(_Section):
    """What the robot's controllers take; needed only to move the robot with the chunk player.

    ``rate_hz`` is the control rate. ``stepwise`` names dimensions that keep each row's value until the next row
    (grippers that open and close), instead of being interpolated. ``unused`` names dimensions that no controller takes.
    ``start_distance`` is how far the first command may lie from the measured pose: one number for all position
    dimensions, or one by name, in each dimension's unit.
    """

    rate_hz: Annotated[float, Field(ge=1.0, le=1000.0)] = 100.0
    controllers: Annotated[dict[str, Controller], Field(min_length=1)]
    stepwise: list[NonEmpty] = Field(default_factory=list)
    unused: list[NonEmpty] = Field(default_factory=list)
    start_distance: Annotated[float, Field(gt=0)] | dict[NonEmpty, Annotated[float, Field(gt=0)]]


class ModelExpectation(_Section):
    """What the profile knows about checkpoints for this robot; ``null`` follows the checkpoint.

    ``padded_state``: the checkpoint was trained with the state padded with zeros to the model's width before it was
    written into the prompt. Normally only the real dimensions are.
    """

    state_in_prompt: bool | None = None
    padded_state: bool = False
    normalization: Literal["quantile", "mean_std", "none"] | None = None
    statistics: NonEmpty | None = None
    resize: Literal["torch", "pil"] | None = None


class Profile(_Section):
    """One robot, as its YAML file describes it.

    ``adapt_to_pi``: the checkpoint was trained on ALOHA data that OpenPI had converted to the pi convention (joint
    signs, gripper ranges); ``aloha_gripper`` are the constants of that conversion where they are not OpenPI's.
    """

    name: NonEmpty
    description: str = ""
    family: Literal["aloha", "droid", "libero", "ur5e"] | None = None
    cameras: dict[str, Camera]
    absent_slots: list[str] = Field(default_factory=list)
    anchor: NonEmpty | None = None
    state: StateSpec
    action: ActionSpec
    adapt_to_pi: bool = False
    aloha_gripper: AlohaGripper | None = None
    timing: Timing = Field(default_factory=Timing)
    model: ModelExpectation = Field(default_factory=ModelExpectation)
    output: Output | None = None
    reset_pose: list[float] | None = None
    prompt: str | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Profile:
        slots = [camera.slot for camera in self.cameras.values() if camera.slot is not None]
        for slot in slots:
            if slots.count(slot) > 1:
                raise ValueError(f"cameras: slot {slot} is fed by more than one camera")
        for slot in self.absent_slots:
            if slot in slots:
                raise ValueError(f"absent_slots: {slot} is fed by a camera; it cannot be absent as well")
        if self.anchor is not None and self.anchor not in self.cameras:
            raise ValueError(f"anchor: {self.anchor} is none of the cameras {sorted(self.cameras)}")
        for label, dims in (("state", self.state.dims), ("action", self.action.dims)):
            names = [dim.name for dim in dims]
            twice = sorted({name for name in names if names.count(name) > 1})
            if twice:
                raise ValueError(f"{label}.dims: names stand twice: {twice}")
        for dim in self.state.dims:
            if dim.source is not None and dim.source not in self.state.sources:
                raise ValueError(
                    f"state.dims: {dim.name} is read from source {dim.source}, "
                    f"which is none of {sorted(self.state.sources)}"
                )
            if dim.source is None and len(self.state.sources) > 1:
                raise ValueError(
                    f"state.dims: {dim.name} names no source, and there are {sorted(self.state.sources)} to choose from"
                )
        self._check_output()
        if self.reset_pose is not None and len(self.reset_pose) != len(self.state.dims):
            raise ValueError(f"reset_pose: {len(self.state.dims)} values expected, got {len(self.reset_pose)}")
        if self.aloha_gripper is not None and not self.adapt_to_pi:
            raise ValueError(
                "aloha_gripper: only adapt_to_pi uses it, and that is false; set it or leave this section out"
            )
        if self.adapt_to_pi and (len(self.state.dims), len(self.action.dims)) != (14, 14):
            raise ValueError(
                "adapt_to_pi: ALOHA's convention is defined for 14 state and 14 action dimensions, "
                f"got {len(self.state.dims)} and {len(self.action.dims)}"
            )
        return self

    def _check_output(self) -> None:
        """Every action dimension goes to exactly one controller, which can carry it, or is called unused."""
        output = self.output
        if output is None:
            return
        dims = {dim.name: dim for dim in self.action.dims}
        measured = {dim.name for dim in self.state.dims if dim.field == "position"}
        taken: dict[str, str] = {}
        for name, controller in output.controllers.items():
            for dim in controller.dims:
                if dim not in dims:
                    raise ValueError(f"output.controllers.{name}: {dim} is none of the action dimensions {list(dims)}")
                if dim in taken:
                    raise ValueError(f"output.controllers.{name}: {dim} goes to {taken[dim]} already")
                taken[dim] = name
                wants = {"position": ("position", "gripper"), "velocity": ("velocity",)}[controller.control]
                if dims[dim].control not in wants:
                    raise ValueError(
                        f"output.controllers.{name}: takes {controller.control}, "
                        f"and the action {dim} is {dims[dim].control}"
                    )
        for label, names in (("stepwise", output.stepwise), ("unused", output.unused)):
            strangers = [name for name in names if name not in dims]
            if strangers:
                raise ValueError(f"output.{label}: {strangers} are none of the action dimensions {list(dims)}")
        both = [name for name in output.unused if name in taken]
        nowhere = [name for name in dims if name not in taken and name not in output.unused]
        if both or nowhere:
            raise ValueError(
                f"output: every action dimension goes to one controller or stands in unused; "
                f"{nowhere} go nowhere, {both} are both"
            )
        positions = [name for name in taken if dims[name].control == "position"]
        unmeasured = [name for name in positions if name not in measured]
        if unmeasured:
            raise ValueError(
                f"output: positions {unmeasured} need a state dimension of the same name, to compare the first command "
                "with the measured pose"
            )
        if isinstance(output.start_distance, dict):
            given = set(output.start_distance)
            if not set(positions) <= given or not given <= set(taken) & measured:
                raise ValueError(
                    f"output.start_distance: numbers for {positions} expected (others only where measured), "
                    f"got {sorted(given)}"
                )

    def source_of(self, dim: StateDimension) -> str:
        """Name of the state source that carries ``dim``."""
        return dim.source or next(iter(self.state.sources))


def available_profiles() -> list[str]:
    """Names of the profiles that ship with the package, sorted; ``raw`` (no file, made from a checkpoint) included."""
    return sorted([path.stem for path in (config_dir() / "profiles").glob("*.yaml")] + ["raw"])


def load_profile(name_or_path: str | Path) -> Profile:
    """Read a profile by the name of a shipped one or by the path of a YAML file.

    Raises:
        ProfileError: ``profile.unknown``, ``profile.unreadable``, ``profile.invalid`` or ``profile.open_question``;
            the message names the file, the key and what was expected.
    """
    path = Path(name_or_path).expanduser()
    if path.suffix not in (".yaml", ".yml"):
        path = config_dir() / "profiles" / f"{name_or_path}.yaml"
    if not path.is_file():
        raise ProfileError(
            "unknown",
            f"profile {str(name_or_path)!r}: expected the path of a .yaml file or one of {available_profiles()}",
        )
    try:
        content: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ProfileError("unreadable", f"{path}: expected a YAML file, got {error}") from error
    return parse_profile(content, origin=str(path))


def parse_profile(content: Any, origin: str) -> Profile:
    """Validate the content of a profile file; ``origin`` names it in errors.

    Raises:
        ProfileError: ``profile.invalid``, or ``profile.open_question`` for a draft with questions left.
    """
    if not isinstance(content, dict):
        raise ProfileError("invalid", f"{origin}: expected a mapping of keys at the top, got {type(content).__name__}")
    questions = [f"{key}: {question}" for key, question in open_questions(content)]
    if questions:
        raise ProfileError(
            "open_question",
            f"{origin}: {len(questions)} values are expected in place of questions: " + " | ".join(questions),
            {"file": origin, "problems": questions},
        )
    try:
        return Profile.model_validate(content)
    except ValidationError as error:
        lines = []
        for problem in error.errors(include_url=False):
            key = ".".join(str(part) for part in problem["loc"]) or "(top)"
            got = "" if problem["type"] == "missing" else f"; got {problem.get('input')!r:.120}"
            lines.append(f"{key}: {problem['msg']}{got}")
        raise ProfileError("invalid", f"{origin}: " + " | ".join(lines), {"file": origin, "problems": lines}) from error


def open_questions(content: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """(key, question) of every value that is still a question."""
    if isinstance(content, dict):
        for name, value in content.items():
            yield from open_questions(value, f"{key}.{name}" if key else str(name))
    elif isinstance(content, list):
        for index, value in enumerate(content):
            yield from open_questions(value, f"{key}.{index}")
    elif isinstance(content, str) and content.startswith(OPEN_QUESTION):
        yield key, content.removeprefix(OPEN_QUESTION).strip()
