"""What a few seconds of listening found on a robot's topics: plain facts, without ROS."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

IMAGE, COMPRESSED, JOINTS = (f"sensor_msgs/msg/{name}" for name in ("Image", "CompressedImage", "JointState"))
READABLE_TYPES = (IMAGE, COMPRESSED, JOINTS)


@dataclass(frozen=True)
class SeenPublisher:
    """One publisher of a topic.

    Attributes:
        node: full name of its node.
        type: of its messages, e.g. ``sensor_msgs/msg/Image``.
        qos_problem: why the policy node's subscription would not match it; empty where it does.
    """

    node: str
    type: str
    qos_problem: str = ""


@dataclass(frozen=True)
class SeenJoint:
    """One joint of a JointState topic.

    Attributes:
        fields: those of position, velocity and effort that carried a number for it.
        not_finite: whether one of these numbers was NaN or infinite.
    """

    fields: frozenset[str] = frozenset()
    not_finite: bool = False


@dataclass(frozen=True)
class SeenTopic:
    """What came on one topic.

    Attributes:
        messages: how many came; everything below is empty or zero without any.
        rate_hz: by their arrival; 0 for fewer than two messages.
        zero_stamps: messages whose header stamp is zero; the two below leave them out.
        lead_s: the furthest that a stamp lay ahead of the node's clock on arrival; negative where none did.
        age_s: the oldest that a stamp was on arrival.
        pictures: (encoding or format, width, height) of every kind of picture that could be read.
        unreadable: why pictures could not be read, each sentence once.
        layouts: the lists of joint names that came, each once.
        joints: joint name -> what was seen of it.
    """

    topic: str
    publishers: tuple[SeenPublisher, ...]
    messages: int = 0
    rate_hz: float = 0.0
    zero_stamps: int = 0
    lead_s: float = 0.0
    age_s: float = 0.0
    pictures: tuple[tuple[str, int, int], ...] = ()
    unreadable: tuple[str, ...] = ()
    layouts: tuple[tuple[str, ...], ...] = ()
    joints: Mapping[str, SeenJoint] = field(default_factory=dict)

    @property
    def types(self) -> tuple[str, ...]:
        """Types that are published here, each once."""
        return tuple(dict.fromkeys(publisher.type for publisher in self.publishers))


@dataclass(frozen=True)
class Survey:
    """All topics that were listened to, by full name, and for how long.

    ``observations`` counts what the policy node's own inputs made of them, ``reason`` is why there was none at the end
    (code and sentence; empty where the inputs were in order); both only where a profile said what belongs together.
    """

    seconds: float
    topics: Mapping[str, SeenTopic]
    observations: int | None = None
    reason: str = ""
