"""The node's lifecycle through its services: what answers meanwhile, what a failure leaves behind, how it ends."""

from __future__ import annotations

import itertools
import signal
import sys
import time
from collections.abc import Iterator

import pytest
import ros_helpers
from rclpy.parameter import Parameter
from ros_helpers import COMMAND, Graph, Process, stand_in_robot, stub_node
from stub_policy import load_stub

from pi05_ros.node import policy_node
from pi05_ros.node.process import SpinningNodes


@pytest.fixture
def graph() -> Iterator[Graph]:
    with Graph() as graph:
        yield graph


def test_invalid_transitions_are_refused_and_change_nothing(graph: Graph) -> None:
    with stub_node() as node:
        node.wait_for_line("is up")
        for transition in ("activate", "deactivate", "cleanup"):
            assert not graph.change_state(transition, timeout=5.0)
            assert graph.state() == "unconfigured"
        assert graph.change_state("configure")
        for transition in ("configure", "deactivate"):
            assert not graph.change_state(transition, timeout=5.0)
            assert graph.state() == "inactive"
        assert graph.change_state("activate")
        assert graph.state() == "active"
        assert graph.shut_down()
        assert graph.state() == "finalized"
        node.signal(signal.SIGINT)
        assert node.wait(2.0) == 0


@pytest.mark.parametrize("seconds", [5, pytest.param(30, marks=pytest.mark.soak)])
def test_everything_answers_during_a_long_configure(graph: Graph, seconds: int) -> None:
    with stub_node(STUB_LOAD_S=str(seconds)) as node, stand_in_robot():
        node.wait_for_line("is up")
        status = graph.status()
        status.wait_for(lambda s: s.state == "unconfigured")
        began = time.monotonic()
        # The answer to configure comes when it is done; everything below happens before.
        configured = ros_helpers.in_background(lambda: graph.change_state("configure", timeout=20.0 + seconds))
        status.wait_for(lambda s: s.state == "configuring", timeout=1.0)
        for prompt in ("first", "second", "third"):
            asked = time.monotonic()
            assert graph.state() == "configuring"
            assert graph.set_parameter("prompt", prompt) == ""
            assert graph.get_parameter("prompt") == prompt
            assert not graph.change_state("activate", timeout=5.0)
            assert time.monotonic() - asked < 1.0
        assert "configuring" in graph.set_parameter("checkpoint", "another")
        live = status.wait_for(lambda s: s.state == "configuring" and any(x.received > 0 for x in s.streams))
        assert live.reason.startswith("lifecycle.configuring: ")
        status.wait_for(lambda s: s.state == "configuring" and s.prompt == "third")
        assert configured() is True
        assert time.monotonic() - began >= seconds
        during = [at for at, s in zip(status.arrived, status, strict=True) if s.state == "configuring"]
        assert max(b - a for a, b in itertools.pairwise(during)) < 1.5, "the status fell silent"
        assert graph.state() == "inactive"


@pytest.mark.parametrize(
    ("fault", "code"), [("load", "checkpoint.stub"), ("load_unexpected", "error.unexpected: RuntimeError")]
)
def test_a_failed_configure_says_why_and_stays_unconfigured(graph: Graph, fault: str, code: str) -> None:
    with stub_node(STUB_FAULT=fault) as node:
        status = graph.status()
        assert not graph.change_state("configure")
        assert graph.state() == "unconfigured"
        said = status.wait_for(lambda s: code in s.reason)
        assert said.state == "unconfigured"
        assert code in said.last_error
        assert said.last_error_stamp.sec > 0
        assert said.streams == []
        node.wait_for_line(f"configure failed: {code}")
        if fault == "load_unexpected":
            node.wait_for_line("Traceback")
        # And again: nothing half-done stands in the way.
        assert not graph.change_state("configure")
        assert graph.state() == "unconfigured"


def test_a_failed_clean_up_ends_in_error_processing(graph: Graph) -> None:
    with stub_node(STUB_FAULT="close") as node:
        status = graph.status()
        assert graph.change_state("configure")
        assert not graph.change_state("cleanup")
        node.wait_for_line("cleanup failed: error.unexpected: RuntimeError: the stub does not close")
        # What could be given back was; the node can be configured again.
        assert graph.state() == "unconfigured"
        status.wait_for(lambda s: s.state == "unconfigured" and "does not close" in s.reason)
        assert graph.change_state("configure")


def test_configures_again_with_another_checkpoint_and_profile(graph: Graph) -> None:
    with stub_node(), stand_in_robot():
        chunks = graph.chunks()
        assert graph.change_state("configure")
        assert graph.change_state("activate")
        chunks.wait_for(lambda chunk: chunk.checkpoint_id == "stub")
        assert "deactivate and clean up first" in graph.set_parameter("checkpoint", "other")
        assert graph.change_state("deactivate")
        assert "while the node is unconfigured" in graph.set_parameter("profile", "so101")
        assert graph.change_state("cleanup")
        assert graph.set_parameter("checkpoint", "other") == ""
        assert graph.change_state("configure")
        assert graph.change_state("activate")
        again = chunks.wait_for(lambda chunk: chunk.checkpoint_id == "other")
        assert again.chunk_index == 0


def test_a_robot_checkpoint_needs_a_profile(graph: Graph) -> None:
    with stub_node("profile:=''"):
        status = graph.status()
        assert not graph.change_state("configure")
        said = status.wait_for(lambda s: "config.no_profile" in s.reason)
        assert "stub" in said.reason
        assert graph.set_parameter("profile", "nobody") == ""
        assert not graph.change_state("configure")
        status.wait_for(lambda s: "profile.unknown" in s.reason and "nobody" in s.reason)


def test_deactivate_is_immediate_and_nothing_of_before_comes_out(graph: Graph) -> None:
    with stub_node("trigger:=continuous", STUB_INFER_S="1.5") as node, stand_in_robot():
        chunks, status = graph.chunks(), graph.status()
        assert graph.change_state("configure")
        assert graph.change_state("activate")
        chunks.wait_for_count(1)
        time.sleep(0.5)  # into the next inference
        asked = time.monotonic()
        assert graph.change_state("deactivate")
        assert time.monotonic() - asked < 0.3
        count = len(chunks)
        # Activated again while the old inference is still running: its answer belongs to nobody.
        assert graph.change_state("activate")
        activated_ns = time.time_ns()
        chunks.wait_for_count(count + 1)
        fresh = chunks[count]
        assert fresh.chunk_index == 0
        assert fresh.header.stamp.sec * 10**9 + fresh.header.stamp.nanosec > activated_ns
        status.wait_for(lambda s: s.state == "active" and s.reason.startswith("inference.running"))
        assert node.pid


def test_cleanup_waits_for_the_running_inference(graph: Graph) -> None:
    with stub_node("trigger:=continuous", STUB_INFER_S="2"), stand_in_robot():
        chunks = graph.chunks()
        assert graph.change_state("configure")
        assert graph.change_state("activate")
        chunks.wait_for_count(1)
        time.sleep(0.3)
        assert graph.change_state("deactivate")
        assert graph.change_state("cleanup")
        assert graph.state() == "unconfigured"


def test_a_model_that_never_comes_back_ends_finalized(graph: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_node, "_INFERENCE_END_S", 0.3)
    monkeypatch.setenv("STUB_INFER_S", "20")
    given = {"checkpoint": "stub", "profile": "demo", "trigger": "continuous"}
    overrides = [Parameter(name, value=value) for name, value in given.items()]
    node = policy_node.PolicyNode(load_stub, parameter_overrides=overrides, context=graph.context)
    spinning = SpinningNodes([node], graph.context)
    try:
        with stand_in_robot():
            status = graph.status()
            assert graph.change_state("configure")
            assert graph.change_state("activate")
            status.wait_for(lambda s: s.reason.startswith("inference.running"))
            assert graph.change_state("deactivate")
            # Its weights must not be pulled away from under it, so the node cannot come back to unconfigured.
            assert not graph.change_state("cleanup")
            assert graph.state() == "finalized"
            status.wait_for(lambda s: s.state == "finalized" and s.reason.startswith("engine.hung"))
    finally:
        spinning.close()


@pytest.mark.parametrize(
    ("number", "moment"),
    [
        *((signal.SIGINT, m) for m in ("at once", "unconfigured", "configuring", "inactive", "active", "in inference")),
        *((signal.SIGTERM, m) for m in ("at once", "configuring", "in inference")),
    ],
)
def test_a_signal_ends_it_with_0_within_two_seconds(graph: Graph, number: signal.Signals, moment: str) -> None:
    long = {"configuring": {"STUB_LOAD_S": "30"}, "in inference": {"STUB_INFER_S": "10"}}.get(moment, {})
    with stub_node("trigger:=continuous", **long) as node, stand_in_robot():
        node.wait_for_line("is up")
        if moment != "at once":
            status = graph.status()
            status.wait_for(lambda s: s.state == "unconfigured")
        if moment == "configuring":
            graph.send_configure()
            status.wait_for(lambda s: s.state == "configuring")
        elif moment not in ("at once", "unconfigured"):
            assert graph.change_state("configure")
            if moment != "inactive":
                chunks = graph.chunks()
                assert graph.change_state("activate")
                if moment == "active":
                    chunks.wait_for_count(3)
                else:
                    status.wait_for(lambda s: s.reason.startswith("inference.running"))
        began = time.monotonic()
        node.signal(number)
        assert node.wait(5.0) == 0, node.text
        assert time.monotonic() - began < 2.0
        assert "Traceback" not in node.text


def test_the_node_comes_up_before_torch() -> None:
    # Importing torch takes seconds, in which a node that is not up yet answers neither services nor signals.
    code = "import sys, pi05_ros.node.policy_node; sys.exit('torch' in sys.modules)"
    with Process([sys.executable, "-c", code]) as process:
        assert process.wait(60.0) == 0


def test_an_unknown_parameter_is_refused_at_start() -> None:
    with Process([*COMMAND, "node", "--no-autostart", "--ros-args", "-p", "triger:=rate"]) as node:
        assert node.wait(20.0) == 2
        assert "config.unknown_parameter: parameter triger is unknown; did you mean trigger?" in node.text


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("trigger:=sometimes", "trigger: one of ['rate', 'request', 'continuous'] expected, got 'sometimes'"),
        ("trigger_rate_hz:=-1.0", "trigger_rate_hz: double expected (0.01 to 200)"),
        ("trigger_rate_hz:=fast", "trigger_rate_hz: double expected (0.01 to 200)"),
        ("seed:=-2", "seed: integer expected"),
    ],
)
def test_a_parameter_outside_its_range_is_refused_at_start(given: str, expected: str) -> None:
    with stub_node(given) as node:
        assert node.wait(20.0) == 2
        assert expected in node.text
