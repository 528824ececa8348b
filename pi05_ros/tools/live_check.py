"""Holds a profile against what was seen of a live graph."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from pi05_ros.profile import Profile, StateDimension
from pi05_ros.survey import COMPRESSED, IMAGE, JOINTS, SeenTopic, Survey
from pi05_ros.synchronizer import SyncSettings

Level = Literal["error", "note"]
# Pictures of this size were most likely scaled by the sender, and not as in training.
_MODEL_SIZE = 224


@dataclass(frozen=True)
class Finding:
    """Something that is wrong (``error``: the policy would not get what it needs) or worth knowing (``note``)."""

    level: Level
    subject: str
    sentence: str


def compare(
    profile: Profile, survey: Survey, full_names: Mapping[str, str], settings: SyncSettings | None = None
) -> list[Finding]:
    """Everything in which the graph differs from what the profile says, input by input.

    Args:
        full_names: topic as the profile names it -> its full name in the graph.
        settings: how the node will put inputs together (stamps, ages).
    """
    settings = settings or SyncSettings()
    findings: list[Finding] = []
    for name, camera in profile.cameras.items():
        if camera.slot is None:
            continue
        subject = f"camera {name}"
        if camera.topic is None:
            findings.append(
                Finding("error", subject, f"feeds {camera.slot} and has no topic in profile {profile.name}")
            )
            continue
        seen = survey.topics[full_names[camera.topic]]
        expected = COMPRESSED if camera.type == "compressed" else IMAGE
        findings += _stream(subject, seen, expected, camera.optional)
        findings += _messages(subject, seen, profile, settings, settings.max_age_by_stream.get(name))
        findings += _pictures(subject, seen)
    sources = {
        name: [dim for dim in profile.state.dims if profile.source_of(dim) == name] for name in profile.state.sources
    }
    for name, dims in sources.items():
        if not dims:
            continue
        subject = f"state source {name}"
        seen = survey.topics[full_names[profile.state.sources[name].topic]]
        findings += _stream(subject, seen, JOINTS, optional=False)
        findings += _messages(subject, seen, profile, settings, settings.max_age_by_stream.get(name))
        findings += _joints(subject, seen, dims)
    if survey.observations == 0:
        findings.append(
            Finding(
                "error", "observations", f"none could be made in {survey.seconds:g} s: {survey.reason or 'no reason'}"
            )
        )
    elif survey.observations is not None and survey.reason:
        findings.append(Finding("error", "observations", f"they stopped: {survey.reason}"))
    return findings


def inputs_seen(profile: Profile, survey: Survey, full_names: Mapping[str, str]) -> list[tuple[str, str, str, str]]:
    """(input, topic, what came, rate) of each input, for people."""
    rows = []
    inputs = {
        f"camera {name}": camera.topic for name, camera in profile.cameras.items() if camera.slot and camera.topic
    }
    inputs |= {f"state source {name}": source.topic for name, source in profile.state.sources.items()}
    for subject, topic in inputs.items():
        seen = survey.topics[full_names[topic]]
        what = ", ".join(f"{encoding} {width}x{height}" for encoding, width, height in seen.pictures)
        rows.append((subject, seen.topic, what or ", ".join(seen.joints) or "-", f"{seen.rate_hz:.1f} Hz"))
    return rows


def _stream(subject: str, seen: SeenTopic, expected: str, optional: bool) -> Iterator[Finding]:
    """Who publishes the topic, what, and whether the node's subscription matches."""
    if not seen.publishers:
        yield Finding("note" if optional else "error", subject, f"no node publishes {seen.topic} ({expected} expected)")
        return
    for publisher in seen.publishers:
        if publisher.type != expected:
            yield Finding(
                "error", subject, f"{seen.topic}: {expected} expected, node {publisher.node} publishes {publisher.type}"
            )
        elif publisher.qos_problem:
            yield Finding("error", subject, f"{seen.topic}: node {publisher.node}: {publisher.qos_problem}")
    fitting = [publisher.node for publisher in seen.publishers if publisher.type == expected]
    if len(fitting) < 2:
        if fitting and not seen.messages:
            yield Finding("error", subject, f"{seen.topic}: node {fitting[0]} publishes it, and no message came")
        return
    said = f"{seen.topic} is published by {len(fitting)} nodes, {sorted(fitting)}"
    if expected != JOINTS:
        yield Finding("error", subject, f"{said}; their pictures would take turns")
    elif _disjoint(seen.layouts) and len(seen.layouts) >= len(fitting):
        yield Finding("note", subject, f"{said}, each with joints of its own")
    else:
        yield Finding(
            "error", subject, f"{said}, and they do not each have joints of their own; values would take turns"
        )


def _messages(
    subject: str, seen: SeenTopic, profile: Profile, settings: SyncSettings, own_max_age_s: float | None
) -> Iterator[Finding]:
    """Stamps and rate."""
    if not seen.messages:
        return
    max_age_s = settings.max_age_s if own_max_age_s is None else own_max_age_s
    if settings.stamp_source == "header":
        if seen.zero_stamps:
            yield Finding(
                "error",
                subject,
                f"{seen.zero_stamps} of {seen.messages} header stamps are zero; let the driver stamp its messages, or "
                "run the node with sync.stamp_source:=receive",
            )
        if seen.lead_s > settings.future_tolerance_s:
            yield Finding(
                "error",
                subject,
                f"header stamps lie up to {seen.lead_s:.3f} s ahead of this clock, at most "
                f"{settings.future_tolerance_s:g} s expected; synchronise the clocks of both machines",
            )
        if seen.age_s > max_age_s:
            yield Finding(
                "error",
                subject,
                f"stamps are up to {seen.age_s:.3f} s old on arrival, at most {max_age_s:g} s expected; is a clock "
                "wrong, or simulated time used on one side only?",
            )
    if seen.rate_hz * max_age_s < 1.0:
        yield Finding(
            "error",
            subject,
            f"{seen.rate_hz:.1f} messages a second: between two of them the input becomes older than {max_age_s:g} s",
        )
    elif profile.timing.rate_hz is not None and seen.rate_hz < 0.9 * profile.timing.rate_hz:
        yield Finding(
            "note",
            subject,
            f"{seen.rate_hz:.1f} messages a second, and the training data had {profile.timing.rate_hz:g}",
        )


def _pictures(subject: str, seen: SeenTopic) -> Iterator[Finding]:
    for sentence in seen.unreadable:
        yield Finding("error", subject, sentence)
    sizes = list(dict.fromkeys((width, height) for _, width, height in seen.pictures))
    if len(sizes) > 1:
        yield Finding("error", subject, f"{seen.topic}: one size of pictures expected, got {sizes}")
    if (_MODEL_SIZE, _MODEL_SIZE) in sizes:
        yield Finding(
            "note",
            subject,
            f"{seen.topic}: pictures of {_MODEL_SIZE}x{_MODEL_SIZE}; if the driver scales them, send them as the "
            "camera takes them: the node does the scaling, with padding as in training",
        )


def _joints(subject: str, seen: SeenTopic, dims: Iterable[StateDimension]) -> Iterator[Finding]:
    if not seen.messages or not seen.layouts:
        return
    missing = [dim.joint_name for dim in dims if dim.joint_name not in seen.joints]
    if missing:
        yield Finding(
            "error", subject, f"{seen.topic}: joints {missing} expected, and the names are {sorted(seen.joints)}"
        )
    for dim in dims:
        joint = seen.joints.get(dim.joint_name)
        if joint is None:
            continue
        if dim.field not in joint.fields:
            carried = sorted(joint.fields) or "no number"
            yield Finding(
                "error", subject, f"{seen.topic}: {dim.field} of {dim.joint_name} expected, it carries {carried}"
            )
        elif joint.not_finite:
            yield Finding("error", subject, f"{seen.topic}: {dim.joint_name} carried NaN or an infinite number")
    twice = sorted({name for layout in seen.layouts for name in layout if layout.count(name) > 1})
    if twice:
        yield Finding("error", subject, f"{seen.topic}: joints {twice} stand twice in one message")


def _disjoint(layouts: Iterable[tuple[str, ...]]) -> bool:
    names = [name for layout in layouts for name in set(layout)]
    return len(names) == len(set(names))
