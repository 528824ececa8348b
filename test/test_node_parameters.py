"""The node's parameters: documented as they are, checked where they are set, in effect when they say."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import ros_helpers
import yaml
from rcl_interfaces.msg import ParameterType
from rcl_interfaces.srv import DescribeParameters, ListParameters
from ros_helpers import Graph, Process, stand_in_robot, stub_node

from pi05_ros.node import parameters
from pi05_ros.paths import config_dir

TYPES = {
    "bool": ParameterType.PARAMETER_BOOL,
    "integer": ParameterType.PARAMETER_INTEGER,
    "double": ParameterType.PARAMETER_DOUBLE,
    "string": ParameterType.PARAMETER_STRING,
    "string array": ParameterType.PARAMETER_STRING_ARRAY,
}


@pytest.fixture
def graph() -> Iterator[Graph]:
    with Graph() as graph:
        yield graph


def test_the_table_in_the_docs_is_the_code_s() -> None:
    written = (ros_helpers.ROOT / "docs" / "parameters.md").read_text(encoding="utf-8")
    assert written == parameters.table(), "run `pi05-ros parameters > docs/parameters.md`"


def test_the_shipped_file_names_only_parameters_that_exist() -> None:
    content = yaml.safe_load((config_dir() / "policy.yaml").read_text(encoding="utf-8"))
    known = {spec.name: spec for spec in parameters.SPECS}
    for name, value in content["/**"]["ros__parameters"].items():
        assert type(value) is type(known[name].default), name


def test_every_parameter_is_described(graph: Graph) -> None:
    with stub_node():
        names = graph.call(ListParameters, "/policy/list_parameters", ListParameters.Request()).result.names
        ours = [spec.name for spec in parameters.SPECS]
        assert set(ours) <= set(names)
        assert set(names) - set(ours) <= {"use_sim_time", "start_type_description_service"}
        request = DescribeParameters.Request(names=ours)
        descriptors = graph.call(DescribeParameters, "/policy/describe_parameters", request).descriptors
        for spec, descriptor in zip(parameters.SPECS, descriptors, strict=True):
            assert descriptor.type == TYPES[spec.type_name], spec.name
            assert descriptor.description == spec.description
            assert f"changes: {spec.changes}" in descriptor.additional_constraints
            if spec.minimum is not None:
                assert len(descriptor.integer_range) + len(descriptor.floating_point_range) == 1


def test_values_outside_their_range_are_refused_and_change_nothing(graph: Graph) -> None:
    with stub_node():
        for name, wrong in (
            ("trigger", "sometimes"),
            ("trigger_rate_hz", 0.0),
            ("trigger_rate_hz", "fast"),
            ("seed", -2),
            ("num_steps", -1),
            ("dtype", "float16"),
            ("normalization", "guess"),
            ("sync.stamp_source", "none"),
        ):
            before = graph.get_parameter(name)
            assert graph.set_parameter(name, wrong), name
            assert graph.get_parameter(name) == before


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ("sync.slop: 0.1", "config.unknown_parameter: parameter sync.slop is unknown; did you mean sync.slop_s?"),
        ("sync.slop_s: fast", "sync.slop_s: double expected"),
    ],
)
def test_a_wrong_line_in_a_parameter_file_is_refused_at_start(tmp_path: Path, wrong: str, expected: str) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text(f"/**:\n  ros__parameters:\n    checkpoint: builtin\n    {wrong}\n", encoding="utf-8")
    with Process([*ros_helpers.STUB, "--ros-args", "--params-file", str(file)]) as node:
        assert node.wait(20.0) == 2
        assert expected in node.text
        assert "Traceback" not in node.text


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ("sync.max_age_by_stream:=['base=1']", "config.sync"),
        ("sync.max_age_by_stream:=['nobody:1']", "config.sync"),
        ("sync.anchor:=nobody", "config.sync"),
        ("qos:=['base/image_raw:sometimes']", "config.qos"),
    ],
)
def test_what_only_the_profile_can_tell_is_refused_at_configure(graph: Graph, given: str, code: str) -> None:
    with stub_node(given):
        status = graph.status()
        assert not graph.change_state("configure")
        status.wait_for(lambda s: s.state == "unconfigured" and s.reason.startswith(code))


def test_input_settings_reach_the_inputs(graph: Graph) -> None:
    # An offer of best effort does not satisfy a reliable subscription: the override must be what the graph shows.
    reliable, young = "qos:=['base/image_raw:reliable,depth=3']", "sync.max_age_by_stream:=['base:1']"
    with stub_node(reliable, young, "sync.anchor:=left_wrist"), stand_in_robot():
        chunks = graph.chunks()
        assert graph.change_state("configure")
        assert graph.change_state("activate")
        chunks.wait_for_count(1)
        stamps = dict(zip(chunks[0].input_names, chunks[0].input_stamps, strict=True))
        assert chunks[0].header.stamp == stamps["left_wrist"]
        (subscription,) = graph.node.get_subscriptions_info_by_topic("/base/image_raw")
        assert subscription.qos_profile.reliability.name == "RELIABLE"
        assert subscription.node_name == "policy_inputs"
