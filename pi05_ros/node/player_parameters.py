"""The chunk player's parameters."""

from __future__ import annotations

from dataclasses import dataclass

from rclpy.node import Node

from pi05_ros.errors import ConfigurationError
from pi05_ros.node.parameters import ParameterSpec
from pi05_ros.playback.handover import HANDOVERS
from pi05_ros.playback.settings import PlayerSettings

_DEFAULTS = PlayerSettings()


def _seconds(name: str, description: str, minimum: float = 0.0, maximum: float = 60.0) -> ParameterSpec:
    default = getattr(_DEFAULTS, name)
    return ParameterSpec(name, default, "while unconfigured", description, minimum=minimum, maximum=maximum)


SPECS: tuple[ParameterSpec, ...] = (
    ParameterSpec(
        "profile", "", "while unconfigured",
        "Name of a shipped robot profile or path of a YAML file, with an output section: the policy node's.",
    ),
    ParameterSpec(
        "dry_run", True, "while unconfigured",
        "Compute everything and publish ~/command and ~/preview, but open no controller's topic.",
    ),
    ParameterSpec(
        "urdf", "", "while unconfigured",
        "URDF file whose joint limits tighten the profile's. Empty: the profile's alone.",
    ),
    ParameterSpec(
        "allow_unlimited", False, "while unconfigured",
        "Without dry_run, move joints for which neither profile nor URDF gives position and velocity limits.",
    ),
    ParameterSpec("policy", "policy", "while unconfigured", "Name of the policy node; its topics are below it."),
    ParameterSpec(
        "request_chunks", True, "while unconfigured",
        "Ask the policy for each chunk on <policy>/request so early that it comes before the last one is used up; "
        "for its trigger `request`.",
    ),
    ParameterSpec(
        "handover", _DEFAULTS.handover, "while unconfigured",
        "How a new chunk takes over: at once (replace), gradually (blend), as the mean of all chunks that speak about "
        "an instant (ensemble), or nearly at once from a policy that binds each chunk to the last (rtc).",
        choices=HANDOVERS,
    ),
    _seconds("blend_s", "How long `blend` passes from one chunk to the next (seconds).", maximum=10.0),
    _seconds("rtc_blend_s", "How long `rtc` takes up what guidance leaves of the difference (seconds).", maximum=10.0),
    ParameterSpec(
        "ensemble_decay", _DEFAULTS.ensemble_decay, "while unconfigured",
        "Exponent of `ensemble`: the i-th oldest chunk weighs exp(-decay * i).", minimum=0.0, maximum=10.0,
    ),
    ParameterSpec(
        "when_late", _DEFAULTS.when_late, "while unconfigured",
        "What happens when no chunk follows: hold the last command, come to rest (decelerate), or stop until reset.",
        choices=("hold", "decelerate", "stop"),
    ),
    _seconds("decelerate_s", "How long `decelerate` takes to come to rest (seconds).", maximum=10.0),
    _seconds("ramp_s", "How long the first motion passes from the measured pose to the chunk (seconds).", minimum=0.1),
    _seconds("resume_s", "The same when motion is taken up again after it was late (seconds).", minimum=0.05),
    _seconds(
        "observation_timeout_s", "How long an observation may carry motion, from its oldest input on (seconds).",
        minimum=0.05,
    ),
    _seconds(
        "feedback_timeout_s", "How long a joint may be silent while the robot moves before it stops (seconds).",
        minimum=0.01, maximum=10.0,
    ),
    _seconds("policy_timeout_s", "How long the policy's status may be missing (seconds).", minimum=1.5),
    _seconds("request_margin_s", "How much earlier than needed the next chunk is asked for (seconds).", maximum=10.0),
    _seconds("request_timeout_s", "After which an unanswered request is made again (seconds).", minimum=0.05),
    _seconds("clock_jump_s", "By how much the clock may jump before the robot stops (seconds).", minimum=0.01),
    _seconds("hold_s", "How long the hold command is repeated after a stop (seconds).", maximum=10.0),
    ParameterSpec(
        "realtime_priority", 0, "while unconfigured",
        "Run the player's threads with this SCHED_FIFO priority, so that no other load delays commands or stops; needs "
        "the right to (rtprio in /etc/security/limits.conf). 0: as everything else.",
        minimum=0, maximum=98,
    ),
    ParameterSpec(
        "stop_heartbeat_s", 0.0, "while unconfigured",
        "Stop when ~/stop has been silent for so long (seconds), for emergency-stop monitors that publish all the "
        "time; 0: it may be silent.",
        minimum=0.0, maximum=10.0,
    ),
)  # fmt: skip


@dataclass(frozen=True)
class NodeSettings:
    """What a configure of the player uses besides `PlayerSettings`."""

    profile: str
    dry_run: bool
    urdf: str | None
    allow_unlimited: bool
    policy: str
    request_chunks: bool
    stop_heartbeat_s: float
    realtime_priority: int


def node_settings(node: Node) -> NodeSettings:
    """Read them.

    Raises:
        ConfigurationError: ``config.no_profile``.
    """
    value = {spec.name: node.get_parameter(spec.name).value for spec in SPECS}
    if not value["profile"]:
        raise ConfigurationError(
            "no_profile", "parameter profile: the robot's profile expected, the same as the policy node's"
        )
    return NodeSettings(
        profile=value["profile"],
        dry_run=value["dry_run"],
        urdf=value["urdf"] or None,
        allow_unlimited=value["allow_unlimited"],
        policy=value["policy"],
        request_chunks=value["request_chunks"],
        stop_heartbeat_s=value["stop_heartbeat_s"],
        realtime_priority=value["realtime_priority"],
    )


def player_settings(node: Node, steady: bool) -> PlayerSettings:
    """Read how chunks become motion; ``steady``: the node's clock is the machine's, not a simulation's."""
    names = [spec.name for spec in SPECS if hasattr(_DEFAULTS, spec.name)]
    return PlayerSettings(**{name: node.get_parameter(name).value for name in names}, steady=steady)
