"""The node's parameters: declared, checked and documented from one table.

``pi05-ros parameters`` prints the table that docs/parameters.md holds.
"""

from __future__ import annotations

import argparse
import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from rcl_interfaces.msg import FloatingPointRange, IntegerRange, ParameterDescriptor, SetParametersResult
from rclpy.exceptions import InvalidParameterTypeException, InvalidParameterValueException
from rclpy.node import Node
from rclpy.parameter import Parameter

from pi05_ros.errors import ConfigurationError
from pi05_ros.node import qos
from pi05_ros.playback.leftover import RtcSettings
from pi05_ros.synchronizer import SyncSettings

Value = str | int | float | bool | tuple[str, ...]
Changes = Literal["any time", "while unconfigured"]


@dataclass(frozen=True)
class ParameterSpec:
    """One parameter. ``minimum`` and ``maximum`` bound numbers, ``choices`` strings; the default gives the type.

    A tuple stands for an array of strings.
    """

    name: str
    default: Value
    changes: Changes
    description: str
    minimum: float | None = None
    maximum: float | None = None
    choices: tuple[str, ...] = ()

    @property
    def type_name(self) -> str:
        return {bool: "bool", int: "integer", float: "double", str: "string", tuple: "string array"}[type(self.default)]

    @property
    def declared(self) -> Any:
        """The default as rclpy takes it: it reads no type from an empty array, so that one holds an empty string."""
        return list(self.default) or [""] if isinstance(self.default, tuple) else self.default

    @property
    def allowed(self) -> str:
        if self.choices:
            return ", ".join(self.choices)
        if self.minimum is None or self.maximum is None:
            return ""
        return f"{_plain(self.minimum)} to {_plain(self.maximum)}"

    def descriptor(self) -> ParameterDescriptor:
        descriptor = ParameterDescriptor(description=self.description)
        descriptor.additional_constraints = f"changes: {self.changes}"
        if self.choices:
            descriptor.additional_constraints += f"; one of: {', '.join(self.choices)}"
        if self.minimum is not None and self.maximum is not None:
            if isinstance(self.default, int):
                bounds = IntegerRange(from_value=int(self.minimum), to_value=int(self.maximum), step=0)
                descriptor.integer_range = [bounds]
            else:
                bounds = FloatingPointRange(from_value=float(self.minimum), to_value=float(self.maximum), step=0.0)
                descriptor.floating_point_range = [bounds]
        return descriptor


TRIGGERS = ("rate", "request", "continuous")
BUILTIN = "builtin"

_LOADING = (
    ParameterSpec(
        "checkpoint", "", "while unconfigured",
        "Folder or hub id of the checkpoint (LeRobot or OpenPI PyTorch). `builtin` is the small random one that ships "
        "with the package: its actions mean nothing.",
    ),
    ParameterSpec("revision", "", "while unconfigured", "Revision of a hub id; empty: its default branch."),
    ParameterSpec(
        "assets", "", "while unconfigured",
        "Which assets/<id> of an OpenPI folder holds the statistics; needed only where there are several.",
    ),
    ParameterSpec(
        "profile", "", "while unconfigured",
        "Name of a shipped robot profile or path of a YAML file. Empty is allowed only with the built-in checkpoint "
        "and means `demo`.",
    ),
    ParameterSpec("device", "auto", "while unconfigured", "auto (CUDA where there is one), cpu, cuda or cuda:<n>."),
    ParameterSpec(
        "dtype", "auto", "while unconfigured", "auto is float32 on a CPU and bfloat16 elsewhere.",
        choices=("auto", "bfloat16", "float32"),
    ),
    ParameterSpec(
        "statistics", "", "while unconfigured",
        "Statistics file instead of the checkpoint's (OpenPI norm_stats.json, LeRobot stats.json or processor file).",
    ),
    ParameterSpec(
        "normalization", "", "while unconfigured",
        "Overrides profile and checkpoint; `none` runs without statistics. Empty: as profile and checkpoint say.",
        choices=("", "quantile", "mean_std", "none"),
    ),
    ParameterSpec(
        "tokenizer", "", "while unconfigured",
        "PaliGemma tokenizer (tokenizer.json or SentencePiece .model) instead of the checkpoint's.",
    ),
    ParameterSpec(
        "engine", "", "while unconfigured",
        "Preset of the engine (config/presets) or a YAML file; empty: everything resident (docs/engine.md).",
    ),
)  # fmt: skip

SERVE = (
    ParameterSpec(
        "serve.enabled", False, "while unconfigured",
        "Serve the same policy over the OpenPI websocket and HTTP (docs/network.md).",
    ),
    ParameterSpec(
        "serve.host", "127.0.0.1", "while unconfigured",
        "Address to bind. Anything but loopback lets the network in: set a key.",
    ),
    ParameterSpec(
        "serve.port", 8000, "while unconfigured", "Port to bind; 0 takes a free one.", minimum=0, maximum=65535,
    ),
    ParameterSpec(
        "serve.api_key_file", "", "while unconfigured",
        "File with the key that clients must send; empty: the environment's PI05_ROS_API_KEY, else none.",
    ),
    ParameterSpec(
        "serve.allowed_hosts", (), "while unconfigured",
        "Names by which clients may address the server, beside loopback and the address they connect to.",
    ),
    ParameterSpec("serve.tls_certificate", "", "while unconfigured", "PEM file; with serve.tls_key, or both empty."),
    ParameterSpec("serve.tls_key", "", "while unconfigured", "PEM file."),
    ParameterSpec(
        "serve.timeout_s", 60.0, "while unconfigured", "Deadline of a request that states none (seconds).",
        minimum=0.01, maximum=3600.0,
    ),
    ParameterSpec(
        "serve.max_connections", 256, "while unconfigured", "Open connections, idle ones included.",
        minimum=1, maximum=65535,
    ),
    ParameterSpec(
        "serve.max_queue", 64, "while unconfigured", "Network requests that may wait.", minimum=1, maximum=10000,
    ),
    ParameterSpec(
        "serve.max_group", 1, "while unconfigured", "Network requests that may share one pass; 1 never groups.",
        minimum=1, maximum=64,
    ),
    ParameterSpec(
        "serve.max_wait_ms", 0.0, "while unconfigured",
        "How long the oldest waiting request may be held back to fill its group (milliseconds).",
        minimum=0.0, maximum=1000.0,
    ),
    ParameterSpec(
        "serve.served_model_names", (), "while unconfigured",
        "What a request may say as `model`; empty: the checkpoint's id.",
    ),
    ParameterSpec("serve.page", True, "while unconfigured", "A page for browsers at /."),
)  # fmt: skip

_RTC = RtcSettings()
_RUNNING = (
    ParameterSpec(
        "prompt", "", "any time",
        "The instruction; ~/prompt and ~/set_prompt set it as well. It takes effect with the next observation. "
        "Empty: the profile's own prompt.",
    ),
    ParameterSpec(
        "trigger", "rate", "any time",
        "When a chunk is computed: at trigger_rate_hz, once for each message on ~/request, or as soon as the last "
        "chunk is done. Always from the newest observation, and never twice from the same.",
        choices=TRIGGERS,
    ),
    ParameterSpec(
        "trigger_rate_hz", 2.0, "any time", "Chunks per second of the trigger `rate`; slower where the model is.",
        minimum=0.01, maximum=200.0,
    ),
    ParameterSpec(
        "request_timeout_s", 1.0, "any time",
        "How long a message on ~/request waits for an observation before it is refused (seconds).",
        minimum=0.01, maximum=60.0,
    ),
    ParameterSpec(
        "seed", -1, "any time",
        "Seed of the initial noise: chunk i of an activation uses seed + i. -1 draws a new one for every chunk; "
        "each chunk carries the seed it was made with.",
        minimum=-1, maximum=2**62,
    ),
    ParameterSpec(
        "num_steps", 0, "any time", "Denoise steps; 0 takes the checkpoint's number.", minimum=0, maximum=1000,
    ),
    ParameterSpec(
        "rtc", "none", "any time",
        "Real-time chunking: bind each chunk to what of the last one is still to be executed when it arrives, by "
        "guidance, or by a hard prefix with checkpoints that were trained for it. Needs the profile's rate_hz.",
        choices=("none", "guided", "hard_prefix"),
    ),
    ParameterSpec(
        "rtc_fade_rows", _RTC.fade_rows, "any time", "Rows behind the delay over which the pull of `guided` fades.",
        minimum=0, maximum=1000,
    ),
    ParameterSpec(
        "rtc_schedule", _RTC.schedule, "any time", "How the pull of `guided` fades.",
        choices=("zeros", "ones", "linear", "exp"),
    ),
    ParameterSpec(
        "rtc_max_guidance_weight", _RTC.max_guidance_weight, "any time", "Bound of the pull of `guided`.",
        minimum=0.0, maximum=1000.0,
    ),
    ParameterSpec(
        "record", "", "while unconfigured",
        "Folder to which observation and chunk of every inference are written as mcap bags; empty: nothing is.",
    ),
    ParameterSpec(
        "record_max_mb", 1000, "while unconfigured",
        "Upper bound of what is kept there (megabytes); the oldest bags of this run are deleted beyond it.",
        minimum=10, maximum=10_000_000,
    ),
)  # fmt: skip

_DEFAULTS = SyncSettings()
_INPUTS = (
    ParameterSpec(
        "sync.anchor", "", "while unconfigured",
        "Camera whose stamps decide which inputs belong together; empty: the profile's anchor.",
    ),
    ParameterSpec(
        "sync.slop_s", _DEFAULTS.slop_s, "while unconfigured",
        "How far another camera's stamp may be from the anchor's (seconds).", minimum=0.0, maximum=10.0,
    ),
    ParameterSpec(
        "sync.max_age_s", _DEFAULTS.max_age_s, "while unconfigured",
        "How old an input may be when an observation is made of it (seconds).", minimum=0.001, maximum=3599.0,
    ),
    ParameterSpec(
        "sync.max_age_by_stream", (), "while unconfigured",
        "Exceptions to sync.max_age_s: `camera:seconds` or `state source:seconds`.",
    ),
    ParameterSpec(
        "sync.dead_after_s", _DEFAULTS.dead_after_s, "while unconfigured",
        "A stream that brought nothing usable for so long is called dead (seconds).", minimum=0.01, maximum=3599.0,
    ),
    ParameterSpec(
        "sync.stamp_source", _DEFAULTS.stamp_source, "while unconfigured",
        "header: the publisher's stamps, and a zero or future one is refused. receive: the time of arrival, for "
        "drivers that stamp nothing.",
        choices=("header", "receive"),
    ),
    ParameterSpec(
        "sync.future_tolerance_s", _DEFAULTS.future_tolerance_s, "while unconfigured",
        "How far a header stamp may lie ahead of the node's clock (seconds).", minimum=0.0, maximum=3599.0,
    ),
    ParameterSpec(
        "sync.detect_frozen", _DEFAULTS.detect_frozen, "while unconfigured",
        "Refuse a camera that sends the same picture, byte for byte, with new stamps.",
    ),
    ParameterSpec(
        "sync.frozen_after_s", _DEFAULTS.frozen_after_s, "while unconfigured",
        "For how long the picture must have been the same (seconds).", minimum=0.01, maximum=3599.0,
    ),
    ParameterSpec(
        "qos", (), "while unconfigured",
        "Quality of service of single input topics, `topic:policies`, for example "
        "`front/image_raw:reliable,depth=10`; policies: reliable, best_effort, volatile, transient_local, depth=N.",
    ),
)  # fmt: skip

SPECS: tuple[ParameterSpec, ...] = _LOADING + _RUNNING + _INPUTS + SERVE
_OPTIONAL = ("revision", "assets", "statistics", "normalization", "tokenizer", "engine")
_BY_NAME = {spec.name: spec for spec in SPECS}


@dataclass(frozen=True)
class LoadSettings:
    """What a configure uses; ``None`` where a parameter is empty."""

    checkpoint: str | None
    revision: str | None
    assets: str | None
    profile: str
    device: str
    dtype: str
    statistics: str | None
    normalization: str | None
    tokenizer: str | None
    engine: str | None


@dataclass(frozen=True)
class RunSettings:
    """What the next chunk uses. Replaced as a whole at every change, so that a reader never sees half of one."""

    prompt: str | None
    trigger: str
    trigger_rate_hz: float
    request_timeout_s: float
    seed: int | None
    num_steps: int | None
    rtc: RtcSettings | None = None


def declare(node: Node, overrides: Mapping[str, Parameter], specs: Sequence[ParameterSpec] | None = None) -> None:
    """Declare every parameter and refuse overrides that name none.

    Args:
        node: the node that owns the parameters.
        overrides: name -> value given on the command line, in a parameter file or to the constructor.
        specs: the node's parameters; those of the policy node unless given.

    Raises:
        ConfigurationError: ``config.unknown_parameter`` or ``config.parameter``.
    """
    specs = SPECS if specs is None else specs
    problems = []
    for spec in specs:
        try:
            node.declare_parameter(spec.name, spec.declared, spec.descriptor())
        except (InvalidParameterTypeException, InvalidParameterValueException) as error:
            problems.append(f"{spec.name}: {spec.type_name} expected{_within(spec)}; {error}")
    if problems:
        raise ConfigurationError("parameter", "; ".join(problems))
    unknown = [name for name in overrides if not node.has_parameter(name) and not name.startswith("qos_overrides.")]
    if unknown:
        raise ConfigurationError("unknown_parameter", "; ".join(_unknown(name, specs) for name in sorted(unknown)))
    refused = refusal([node.get_parameter(spec.name) for spec in specs], "unconfigured", specs)
    if refused:
        raise ConfigurationError("parameter", refused)


def refusal(parameters: Iterable[Parameter], state: str, specs: Sequence[ParameterSpec] | None = None) -> str:
    """Why these values cannot be set in this lifecycle state; empty when they can."""
    by_name = _BY_NAME if specs is None else {spec.name: spec for spec in specs}
    for parameter in parameters:
        spec = by_name.get(parameter.name)
        if spec is None:
            continue
        if spec.changes == "while unconfigured" and state != "unconfigured":
            return (
                f"{spec.name} changes only while the node is unconfigured, and it is {state}; "
                "deactivate and clean up first"
            )
        if spec.choices and parameter.value not in spec.choices:
            return f"{spec.name}: one of {list(spec.choices)} expected, got {parameter.value!r}"
    return ""


def check(parameters: list[Parameter], state: str, specs: Sequence[ParameterSpec] | None = None) -> SetParametersResult:
    """Answer of the set-parameters callback."""
    reason = refusal(parameters, state, specs)
    return SetParametersResult(successful=not reason, reason=reason)


def load_settings(node: Node) -> LoadSettings:
    """Read what a configure uses.

    Raises:
        ConfigurationError: ``config.no_checkpoint``, ``config.no_profile`` or ``config.no_topics``.
    """
    text = {spec.name: str(node.get_parameter(spec.name).value) for spec in _LOADING}
    checkpoint, profile = text["checkpoint"], text["profile"]
    if not checkpoint:
        raise ConfigurationError(
            "no_checkpoint",
            "parameter checkpoint: a folder or hub id is expected, and it is empty; `builtin` is the small random one",
        )
    if not profile and checkpoint != BUILTIN:
        raise ConfigurationError(
            "no_profile",
            f"parameter profile: the robot that checkpoint {checkpoint} drives is expected, and it is empty; "
            "`pi05-ros profile` lists those that ship with the package",
        )
    if profile == "raw":
        raise ConfigurationError(
            "no_topics", "parameter profile: a profile with topics is expected, and `raw` has none; name a robot's"
        )
    return LoadSettings(
        checkpoint=None if checkpoint == BUILTIN else checkpoint,
        profile=profile or "demo",
        device=text["device"],
        dtype=text["dtype"],
        **{name: text[name] or None for name in _OPTIONAL},
    )


def run_settings(node: Node) -> RunSettings:
    """Read what the next chunk uses."""
    value: dict[str, Any] = {spec.name: node.get_parameter(spec.name).value for spec in _RUNNING}
    return RunSettings(
        prompt=value["prompt"] or None,
        trigger=value["trigger"],
        trigger_rate_hz=value["trigger_rate_hz"],
        request_timeout_s=value["request_timeout_s"],
        seed=None if value["seed"] < 0 else value["seed"],
        num_steps=value["num_steps"] or None,
        rtc=None
        if value["rtc"] == "none"
        else RtcSettings(value["rtc"], value["rtc_fade_rows"], value["rtc_schedule"], value["rtc_max_guidance_weight"]),
    )


def sync_settings(node: Node) -> SyncSettings:
    """Read how inputs are put together.

    Raises:
        ConfigurationError: ``config.sync``.
    """
    names = [field.name for field in fields(SyncSettings) if node.has_parameter(f"sync.{field.name}")]
    values: dict[str, Any] = {name: node.get_parameter(f"sync.{name}").value for name in names}
    ages = {}
    for entry in filter(None, values["max_age_by_stream"]):
        stream, _, seconds = entry.rpartition(":")
        try:
            ages[stream.strip()] = float(seconds)
        except ValueError:
            raise ConfigurationError(
                "sync", f"sync.max_age_by_stream: `stream:seconds` expected, got {entry!r}"
            ) from None
    values |= {"max_age_by_stream": ages, "anchor": values["anchor"] or None}
    return SyncSettings(**values)


def qos_overrides(node: Node) -> dict[str, str]:
    """Read the overrides: topic, resolved as the node's own, to policies.

    Raises:
        ConfigurationError: ``config.qos``.
    """
    entries = filter(None, node.get_parameter("qos").value)
    return {node.resolve_topic_name(topic): policies for topic, policies in qos.parse_overrides(entries).items()}


def table() -> str:
    """docs/parameters.md."""
    lines = [
        "# Parameters of the policy node",
        "",
        "Generated by `pi05-ros parameters > docs/parameters.md`. A parameter that is not in this table is refused at",
        "start; `ros2 param describe /policy NAME` tells the same as its line here.",
        "",
        "| Parameter | Type | Default | Allowed | Changes | Meaning |",
        "|---|---|---|---|---|---|",
    ]
    for spec in SPECS:
        default = _plain(spec.default) if isinstance(spec.default, float) else json.dumps(spec.default)
        allowed = ", ".join(choice or '""' for choice in spec.choices) or spec.allowed
        lines.append(
            f"| `{spec.name}` | {spec.type_name} | `{default}` | {allowed} | {spec.changes} | {spec.description} |"
        )
    return "\n".join(lines) + "\n"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``pi05-ros parameters`` takes none."""


def run(options: argparse.Namespace) -> int:
    """Print the table."""
    print(table(), end="")
    return 0


def _plain(number: float) -> str:
    return f"{number:g}" if abs(number) < 1e6 else str(int(number))


def _within(spec: ParameterSpec) -> str:
    return f" ({spec.allowed})" if spec.allowed else ""


def _unknown(name: str, specs: Sequence[ParameterSpec]) -> str:
    names = [spec.name for spec in specs]
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"; did you mean {near[0]}?" if near else f"; there are {', '.join(names)}"
    return f"parameter {name} is unknown{hint}"
