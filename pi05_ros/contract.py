"""Fits a robot's profile and a checkpoint together; what does not fit is refused with both sides named."""

from __future__ import annotations

import io
from dataclasses import dataclass

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pi05_ros.checkpoint.description import Checkpoint
from pi05_ros.errors import ContractError
from pi05_ros.profile import (
    ActionDimension,
    ActionSpec,
    Camera,
    Profile,
    StateDimension,
    StateSpec,
    Timing,
    Unit,
)
from pi05_ros.transforms.images import ResizeKind
from pi05_ros.transforms.normalization import NormalizationKind, Normalizer

RAW = "raw"


@dataclass(frozen=True)
class Row:
    """One line of the table: what was compared, both sides, and what holds."""

    subject: str
    robot: str
    checkpoint: str
    agreed: str


@dataclass(frozen=True)
class Contract:
    """What profile and checkpoint agreed on; everything the policy needs, with nothing left to guess.

    Attributes:
        slots: the checkpoint's cameras in its own order, each with the robot's camera that feeds it, or ``None``.
        relative: bool [action_dim], True where the model's action is relative to the chunk's start state.
        state_normalizer, action_normalizer: robot's model-unit numbers <-> the network's.
        normalization: quantile, mean_std or none, for people and metadata.
    """

    profile: Profile
    slots: tuple[tuple[str, str | None], ...]
    state_dim: int
    action_dim: int
    horizon: int
    executed_steps: int
    step_time_s: float | None
    num_steps: int
    state_in_prompt: bool
    resize: ResizeKind
    absent_camera_order: str
    relative: np.ndarray
    state_normalizer: Normalizer
    action_normalizer: Normalizer
    normalization: str
    rows: tuple[Row, ...]

    @property
    def state_names(self) -> tuple[str, ...]:
        return tuple(dim.name for dim in self.profile.state.dims)

    @property
    def action_names(self) -> tuple[str, ...]:
        return tuple(dim.name for dim in self.profile.action.dims)

    def table(self) -> str:
        """The agreement for people to read: a line per subject, both sides and what holds."""
        table = Table("", "robot", "checkpoint", "agreed", box=box.SIMPLE, padding=(0, 2, 0, 0))
        for row in self.rows:
            table.add_row(*(Text(text) for text in (row.subject, row.robot, row.checkpoint, row.agreed)))
        console = Console(width=120, file=io.StringIO(), color_system=None)
        with console.capture() as captured:
            console.print(table)
        return "\n".join(line.rstrip() for line in captured.get().splitlines() if line.strip())


def raw_profile(checkpoint: Checkpoint) -> Profile:
    """The profile without a robot: the checkpoint's own camera names, any state up to its width, its full output."""
    unit: Unit = "normalized" if checkpoint.action_statistics is None else "unitless"
    names = checkpoint.action_names or tuple(f"action_{index}" for index in range(checkpoint.action_dim))
    return Profile(
        name=RAW,
        description="the checkpoint's own names and widths",
        cameras={camera: Camera(slot=camera) for camera in _fed_slots(checkpoint)},
        state=StateSpec(
            exact=False,
            dims=[StateDimension(name=f"state_{index}", unit=unit) for index in range(checkpoint.state_dim)],
        ),
        action=ActionSpec(dims=[ActionDimension(name=name, unit=unit, control="unspecified") for name in names]),
        timing=Timing(),
    )


def _fed_slots(checkpoint: Checkpoint) -> tuple[str, ...]:
    """The checkpoint's cameras that a robot can feed, in order."""
    return tuple(camera for camera in checkpoint.cameras if camera not in checkpoint.empty_cameras)


def check_contract(
    profile: Profile | None,
    checkpoint: Checkpoint,
    normalization: str | None = None,
) -> Contract:
    """Fit ``profile`` (``None``: raw) and ``checkpoint`` together.

    Args:
        normalization: quantile, mean_std or none, said by the user in so many words; overrides profile and checkpoint.

    Raises:
        ContractError: ``contract.<subject>``, naming both sides.
    """
    robot = raw_profile(checkpoint) if profile is None else profile
    slots = _fit_cameras(robot, checkpoint)
    state_dim, action_dim = _fit_widths(robot, checkpoint)
    kind, state_normalizer, action_normalizer = _fit_normalization(robot, checkpoint, normalization)
    in_prompt = bool(_fit_choice("state_in_prompt", robot.model.state_in_prompt, checkpoint.state_in_prompt, True))
    horizon = _fit_choice("horizon", robot.timing.horizon, checkpoint.config.horizon)
    executed = robot.timing.executed_steps or checkpoint.executed_steps or horizon
    if executed > horizon:
        raise ContractError(
            "executed_steps",
            f"executed_steps: profile {robot.name} wants {executed} steps of each chunk executed, "
            f"checkpoint {checkpoint.id} gives {horizon}",
        )
    relative = _fit_relative(robot, checkpoint, action_dim)
    near_constant = [
        f"{label} {dims[index].name}"
        for label, normalizer, dims in (
            ("state", state_normalizer, robot.state.dims),
            ("action", action_normalizer, robot.action.dims),
        )
        for index in normalizer.near_constant_dimensions()
        if index < len(dims)
    ]
    step_time = None if robot.timing.rate_hz is None else 1.0 / robot.timing.rate_hz
    resize = robot.model.resize or checkpoint.resize

    fed = "\n".join(f"{camera or 'absent'} -> {slot}" for slot, camera in slots)
    state_rule = ("" if robot.state.exact else " at most") + (", in the prompt" if in_prompt else ", not used")
    said_horizon, said_resize = robot.timing.horizon or "-", robot.model.resize or "-"
    controls = "\n".join(f"{dim.name} {dim.control} [{dim.unit}]" for dim in robot.action.dims)
    rows = (
        Row("cameras", ", ".join(robot.cameras), ", ".join(checkpoint.cameras), fed),
        Row("state", f"{len(robot.state.dims)} dims", f"{checkpoint.state_dim} dims", f"{state_dim}{state_rule}"),
        Row("action", f"{action_dim} dims", f"{checkpoint.action_dim} dims", f"{int(relative.sum())} relative inside"),
        Row("control", controls, "-", "as the robot says"),
        Row("normalization", robot.model.normalization or "-", _spoken(checkpoint.action_normalization), kind),
        Row("horizon", str(said_horizon), str(checkpoint.config.horizon), f"{horizon} steps, {executed} executed"),
        Row(
            "step time",
            f"{robot.timing.rate_hz:g} Hz" if robot.timing.rate_hz else "-",
            "-",
            f"{step_time * 1e3:g} ms" if step_time else "unknown",
        ),
        Row("denoise steps", "-", str(checkpoint.num_steps), str(checkpoint.num_steps)),
        Row("resize", said_resize, checkpoint.resize, resize),
        *(Row("near constant", "-", name, "moved less than its resolution in training") for name in near_constant),
        *(Row("note", "-", note, "a default") for note in checkpoint.notes),
    )
    return Contract(
        profile=robot,
        slots=slots,
        state_dim=state_dim,
        action_dim=action_dim,
        horizon=horizon,
        executed_steps=executed,
        step_time_s=step_time,
        num_steps=checkpoint.num_steps,
        state_in_prompt=in_prompt,
        resize=resize,
        absent_camera_order=checkpoint.absent_camera_order,
        relative=relative,
        state_normalizer=state_normalizer,
        action_normalizer=action_normalizer,
        normalization=kind,
        rows=rows,
    )


def _slots_of(robot: Profile) -> list[tuple[str, str]]:
    return [(name, camera.slot) for name, camera in robot.cameras.items() if camera.slot is not None]


def _fit_cameras(robot: Profile, checkpoint: Checkpoint) -> tuple[tuple[str, str | None], ...]:
    slot_of = {name: checkpoint.camera_aliases.get(slot, slot) for name, slot in _slots_of(robot)}
    feeding = {slot: name for name, slot in slot_of.items()}
    if len(feeding) != len(slot_of):
        raise ContractError(
            "cameras", f"profile {robot.name} feeds one camera of checkpoint {checkpoint.id} twice: {slot_of}"
        )
    both = (
        f"profile {robot.name} feeds {sorted(feeding)} and leaves {sorted(robot.absent_slots)} absent; "
        f"checkpoint {checkpoint.id} has the cameras {list(checkpoint.cameras)}"
    )
    unknown = sorted((set(feeding) | set(robot.absent_slots)) - set(checkpoint.cameras))
    if unknown:
        raise ContractError("cameras", f"cameras {unknown} are none of the checkpoint's: {both}")
    empty = set(checkpoint.empty_cameras)
    fed_empty = sorted(set(feeding) & empty)
    if fed_empty:
        raise ContractError("cameras", f"cameras {fed_empty} were always empty in training and cannot be fed: {both}")
    missing = [slot for slot in checkpoint.cameras if slot not in {*feeding, *robot.absent_slots, *empty}]
    if missing:
        raise ContractError(
            "cameras",
            f"cameras {missing} of the checkpoint are neither fed nor named in absent_slots: {both}; "
            "map a camera to each or say that it is absent",
        )
    if not feeding:
        raise ContractError("cameras", f"no camera is fed: {both}")
    return tuple((slot, feeding.get(slot)) for slot in checkpoint.cameras)


def _fit_widths(robot: Profile, checkpoint: Checkpoint) -> tuple[int, int]:
    state_dim, action_dim = len(robot.state.dims), len(robot.action.dims)
    for label, ours, theirs, names in (
        ("state", state_dim, checkpoint.state_dim, [dim.name for dim in robot.state.dims]),
        ("action", action_dim, checkpoint.action_dim, [dim.name for dim in robot.action.dims]),
    ):
        # OpenPI's checkpoints state only the padded width; how much of it is real is the robot's to say.
        fits = ours == theirs if checkpoint.format == "lerobot" else ours <= theirs
        if not fits:
            raise ContractError(
                f"{label}_width",
                f"{label}: profile {robot.name} has {ours} dimensions {names}, checkpoint {checkpoint.id} has {theirs}",
            )
    theirs_names = checkpoint.action_names
    if theirs_names is not None and list(theirs_names) != [dim.name for dim in robot.action.dims]:
        raise ContractError(
            "action_names",
            f"action names or their order differ: profile {robot.name} has {[dim.name for dim in robot.action.dims]}, "
            f"checkpoint {checkpoint.id} has {list(theirs_names)}",
        )
    return state_dim, action_dim


def _fit_choice(label: str, robots: int | None, checkpoints: int | None, default: int | None = None) -> int:
    """One value that both sides may state; a contradiction is refused."""
    if robots is not None and checkpoints is not None and robots != checkpoints:
        raise ContractError(label, f"{label}: the profile says {robots}, the checkpoint says {checkpoints}")
    for value in (robots, checkpoints, default):
        if value is not None:
            return value
    raise ContractError(label, f"{label}: neither the profile nor the checkpoint says it; give it in the profile")


def _fit_normalization(robot: Profile, checkpoint: Checkpoint, said: str | None) -> tuple[str, Normalizer, Normalizer]:
    """The kind (quantile, mean_std, none, or mixed), and the normalisers of state and action."""
    if said not in (None, "quantile", "mean_std", "none"):
        raise ContractError("normalization", f"normalization: quantile, mean_std or none expected, got {said!r}")
    parts = {
        "state": (checkpoint.state_normalization, checkpoint.state_statistics, len(robot.state.dims)),
        "action": (checkpoint.action_normalization, checkpoint.action_statistics, len(robot.action.dims)),
    }
    kinds: dict[str, NormalizationKind] = {}
    normalizers = []
    for label, (stated, statistics, dims) in parts.items():
        expected = robot.model.normalization
        if said is None and expected is not None and expected != _spoken(stated):
            raise ContractError(
                "normalization",
                f"{label}: profile {robot.name} expects normalization {expected}, checkpoint {checkpoint.id} was "
                f"trained with {_spoken(stated)}; use a checkpoint of that kind, or say normalization yourself",
            )
        kind: NormalizationKind = stated if said is None else "identity" if said == "none" else said  # type: ignore[assignment]
        if kind != "identity" and statistics is None:
            if robot.name != RAW or said is not None:
                raise ContractError(
                    "no_statistics",
                    f"{label}: profile {robot.name} needs {kind} statistics to turn the network's numbers into robot "
                    f"units, and checkpoint {checkpoint.id} carries none; give a statistics file (OpenPI "
                    "norm_stats.json, LeRobot stats.json or a processor's .safetensors), or say normalization: none",
                )
            kind = "identity"
        if kind != "identity" and statistics is not None:
            # OpenPI pads statistics to the model's width, and lets what lies beyond them pass; LeRobot's are exact.
            padded = checkpoint.format == "openpi" and (statistics.width > dims or robot.name == RAW)
            if statistics.width != dims and not padded:
                raise ContractError(
                    "statistics_width",
                    f"{label}: profile {robot.name} has {dims} dimensions, the statistics of checkpoint "
                    f"{checkpoint.id} have {statistics.width}",
                )
        kinds[label] = kind
        normalizers.append(Normalizer(statistics, kind, checkpoint.normalization_style, label))
    names = dict.fromkeys(_spoken(kind) for kind in kinds.values())
    return " and ".join(names), normalizers[0], normalizers[1]


def _spoken(kind: str) -> str:
    return "none" if kind == "identity" else kind


def _fit_relative(robot: Profile, checkpoint: Checkpoint, action_dim: int) -> np.ndarray:
    """Where the model's actions are relative; the profile and the checkpoint must not contradict each other."""
    stated = checkpoint.relative_actions
    mask = np.zeros(action_dim, dtype=bool)
    for index, dim in enumerate(robot.action.dims):
        checkpoints = None if stated is None else stated.mask[index]
        if dim.relative is not None and checkpoints is not None and dim.relative != checkpoints:
            raise ContractError(
                "relative",
                f"action {dim.name}: profile {robot.name} says relative: {dim.relative}, "
                f"checkpoint {checkpoint.id} says {checkpoints}",
            )
        if dim.control == "gripper" and checkpoints:
            raise ContractError(
                "relative",
                f"action {dim.name}: a gripper is always absolute in profile {robot.name}, "
                f"and relative in checkpoint {checkpoint.id}",
            )
        mask[index] = bool(dim.relative if dim.relative is not None else checkpoints)
    if mask.any() and len(robot.state.dims) < int(np.flatnonzero(mask).max()) + 1:
        raise ContractError(
            "relative",
            f"profile {robot.name}: relative actions need a state dimension of the same index; "
            f"{len(robot.state.dims)} state and {action_dim} action dimensions",
        )
    return mask
