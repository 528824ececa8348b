"""Quality of service: the classes of the package and what a user may override."""

from __future__ import annotations

import pytest
from rclpy.qos import DurabilityPolicy, ReliabilityPolicy

from pi05_ros.errors import ConfigurationError
from pi05_ros.node import qos


def test_inputs_match_every_publisher_and_outputs_arrive() -> None:
    assert qos.SENSOR.reliability == qos.JOINTS.reliability == ReliabilityPolicy.BEST_EFFORT
    for profile in (qos.CHUNK, qos.COMMAND, qos.STATUS):
        assert (profile.reliability, profile.depth) == (ReliabilityPolicy.RELIABLE, 1)
    assert qos.CHUNK.durability == DurabilityPolicy.VOLATILE, "a late subscriber must not execute an old chunk"
    assert qos.STATUS.durability == DurabilityPolicy.TRANSIENT_LOCAL


def test_overrides_change_what_they_name_and_nothing_else() -> None:
    overrides = qos.parse_overrides(["front/image : reliable, depth=7", "/joint_states:transient_local,reliable"])
    changed = qos.for_topic(qos.SENSOR, "front/image", overrides)
    assert (changed.reliability, changed.depth, changed.durability) == (
        ReliabilityPolicy.RELIABLE,
        7,
        DurabilityPolicy.VOLATILE,
    )
    assert qos.for_topic(qos.SENSOR, "wrist/image", overrides) == qos.SENSOR
    assert qos.SENSOR.reliability == ReliabilityPolicy.BEST_EFFORT and qos.SENSOR.depth == 5
    assert qos.for_topic(qos.JOINTS, "/joint_states", overrides).durability == DurabilityPolicy.TRANSIENT_LOCAL


@pytest.mark.parametrize(
    ("entries", "named"),
    [
        (["front/image"], "front/image"),
        ([":reliable"], "reliable"),
        (["front/image:"], "front/image"),
        (["front/image:fast"], "fast"),
        (["front/image:reliable,best_effort"], "reliability stands twice"),
        (["front/image:depth=0"], "depth=0"),
        (["front/image:depth=ten"], "depth=ten"),
        (["front/image:reliable", "front/image:best_effort"], "front/image stands twice"),
    ],
)
def test_overrides_that_say_nothing_clear_are_refused(entries: list[str], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named) as caught:
        qos.parse_overrides(entries)
    assert caught.value.code == "config.qos"
