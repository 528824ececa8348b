"""Quality of service of every topic of the package, by what the topic is for, and how a user overrides it."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping

from rclpy.qos import DurabilityPolicy, HistoryPolicy, QoSProfile, ReliabilityPolicy

from pi05_ros.errors import ConfigurationError


def _keep_last(
    depth: int, reliability: ReliabilityPolicy, durability: DurabilityPolicy = DurabilityPolicy.VOLATILE
) -> QoSProfile:
    return QoSProfile(history=HistoryPolicy.KEEP_LAST, depth=depth, reliability=reliability, durability=durability)


# Best effort: it matches every publisher, and a late picture is worth nothing. Depth 1 would lose the older of two
# frames whenever the executor is held up for one period; if that hits one camera of a synchronous set, the whole set is
# lost. Depth makes no input older: the newest consistent set is chosen by stamps, and what waits is drained first.
SENSOR = _keep_last(5, ReliabilityPolicy.BEST_EFFORT)
# Deeper, because several drivers may share one topic (arm and gripper, each with its own joints): with a short queue
# the fast one pushes the slow one's messages out for ever.
JOINTS = _keep_last(50, ReliabilityPolicy.BEST_EFFORT)
# A robot's own publishers (the stand-in robot): reliable, so that subscribers of either kind match.
ROBOT = _keep_last(5, ReliabilityPolicy.RELIABLE)
# Prompts and requests: the last one counts and must arrive; one sent before this node came up means nothing.
COMMAND = _keep_last(1, ReliabilityPolicy.RELIABLE)
# A chunk answers one moment: it must arrive, and a late subscriber must not execute an old one.
CHUNK = _keep_last(1, ReliabilityPolicy.RELIABLE)
# Whoever comes late still sees the present state.
STATUS = _keep_last(1, ReliabilityPolicy.RELIABLE, DurabilityPolicy.TRANSIENT_LOCAL)
# What /diagnostics aggregators expect.
DIAGNOSTICS = _keep_last(10, ReliabilityPolicy.RELIABLE)

_RELIABILITY = {"reliable": ReliabilityPolicy.RELIABLE, "best_effort": ReliabilityPolicy.BEST_EFFORT}
_DURABILITY = {"volatile": DurabilityPolicy.VOLATILE, "transient_local": DurabilityPolicy.TRANSIENT_LOCAL}
_MAX_DEPTH = 1000


def override(base: QoSProfile, policies: str, topic: str) -> QoSProfile:
    """``base`` changed by what a user wrote for ``topic``.

    Args:
        policies: comma-separated, each one of ``reliable``, ``best_effort``, ``volatile``, ``transient_local`` and
            ``depth=N``; each kind at most once.

    Raises:
        ConfigurationError: ``config.qos``.
    """
    result = copy.copy(base)
    seen: set[str] = set()
    for word in (part.strip() for part in policies.split(",")):
        kind = word
        if word in _RELIABILITY:
            kind, result.reliability = "reliability", _RELIABILITY[word]
        elif word in _DURABILITY:
            kind, result.durability = "durability", _DURABILITY[word]
        elif word.startswith("depth=") and word[6:].isdecimal() and 1 <= int(word[6:]) <= _MAX_DEPTH:
            kind, result.depth = "depth", int(word[6:])
        else:
            allowed = [*_RELIABILITY, *_DURABILITY, f"depth=1..{_MAX_DEPTH}"]
            raise ConfigurationError("qos", f"QoS of topic {topic}: {allowed} expected, got {word!r}")
        if kind in seen:
            raise ConfigurationError("qos", f"QoS of topic {topic}: {kind} stands twice in {policies!r}")
        seen.add(kind)
    return result


def parse_overrides(entries: Iterable[str]) -> dict[str, str]:
    """Topic -> policies, from parameter entries such as ``front/image_raw:reliable,depth=10``.

    Raises:
        ConfigurationError: ``config.qos``.
    """
    overrides: dict[str, str] = {}
    for entry in entries:
        topic, colon, policies = (part.strip() for part in entry.partition(":"))
        if not topic or not colon or not policies:
            raise ConfigurationError("qos", f"QoS override: 'topic:policies' expected, got {entry!r}")
        if topic in overrides:
            raise ConfigurationError("qos", f"QoS override: topic {topic} stands twice")
        override(SENSOR, policies, topic)
        overrides[topic] = policies
    return overrides


def for_topic(base: QoSProfile, topic: str, overrides: Mapping[str, str]) -> QoSProfile:
    """The class ``base``, with the override of ``topic`` if there is one.

    Raises:
        ConfigurationError: ``config.qos``.
    """
    return override(base, overrides[topic], topic) if topic in overrides else base


def describe(profile: QoSProfile) -> str:
    """The two policies that decide whether publisher and subscription match, in words."""
    return f"{profile.reliability.name.lower()}, {profile.durability.name.lower()}"
