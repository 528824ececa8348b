"""When the node answers, with which prompt and seed, and what it says when it does not."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest
from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus
from ros_helpers import RELIABLE, Graph, stand_in_robot, stub_node
from std_msgs.msg import Empty, String

from pi05_ros.msg import ActionChunk
from pi05_ros.srv import SetPrompt


@pytest.fixture
def graph() -> Iterator[Graph]:
    with Graph() as graph:
        yield graph


def stamp_ns(chunk: ActionChunk) -> int:
    return int(chunk.header.stamp.sec) * 10**9 + int(chunk.header.stamp.nanosec)


def bring_up(graph: Graph) -> None:
    assert graph.change_state("configure")
    assert graph.change_state("activate")


def test_at_a_rate_that_can_be_changed(graph: Graph) -> None:
    with stub_node("trigger:=rate", "trigger_rate_hz:=10.0"), stand_in_robot():
        chunks = graph.chunks()
        bring_up(graph)
        chunks.wait_for_count(21)
        gaps = np.diff(chunks.arrived[1:21])
        assert np.mean(gaps) == pytest.approx(0.1, rel=0.1)
        assert graph.set_parameter("trigger_rate_hz", 2.0) == ""
        time.sleep(0.2)
        count = len(chunks)
        chunks.wait_for_count(count + 3)
        assert np.mean(np.diff(chunks.arrived[count : count + 3])) == pytest.approx(0.5, rel=0.15)
        assert len({stamp_ns(chunk) for chunk in chunks}) == len(chunks)
        assert [chunk.chunk_index for chunk in chunks] == list(range(len(chunks)))


def test_as_soon_as_the_last_is_done_and_always_the_newest(graph: Graph) -> None:
    with stub_node("trigger:=continuous", STUB_INFER_S="0.25"), stand_in_robot():
        chunks = graph.chunks()
        bring_up(graph)
        chunks.wait_for_count(9)
        assert np.mean(np.diff(chunks.arrived[1:])) < 0.32
        for chunk in chunks:
            # Frames come every 33 ms; what waited while the model ran is not worked off.
            age = dict(zip(chunk.input_names, chunk.input_ages, strict=True))["base"]
            assert 0.0 < age < 0.15
        assert len({stamp_ns(chunk) for chunk in chunks}) == len(chunks)


def test_faster_than_the_cameras_never_twice_from_the_same(graph: Graph) -> None:
    with stub_node("trigger:=continuous"), stand_in_robot("--camera-hz", "5"):
        chunks = graph.chunks()
        bring_up(graph)
        chunks.wait_for_count(12)
        assert len({stamp_ns(chunk) for chunk in chunks}) == len(chunks)
        assert np.mean(np.diff(chunks.arrived[1:])) == pytest.approx(0.2, rel=0.1)


def test_on_request(graph: Graph) -> None:
    with stub_node("trigger:=request", "request_timeout_s:=0.5") as node:
        chunks, status = graph.chunks(), graph.status()
        ask = graph.node.create_publisher(Empty, "/policy/request", RELIABLE)
        bring_up(graph)
        status.wait_for(lambda s: s.state == "active" and s.reason.startswith("input."))
        ask.publish(Empty())  # without a robot there is nothing to answer it with
        refused = status.wait_for(lambda s: s.refused == 1)
        assert "observation.timeout" in refused.last_error
        with stand_in_robot():
            status.wait_for(lambda s: s.reason.startswith("trigger.waiting"), start=len(status))
            time.sleep(0.5)
            assert not chunks
            for count in (1, 2, 3):
                asked_ns = time.time_ns()
                ask.publish(Empty())
                chunks.wait_for_count(count)
                assert stamp_ns(chunks[-1]) > asked_ns - 200_000_000
            time.sleep(0.5)
            assert len(chunks) == 3
        assert node.pid


def test_prompt_by_parameter_topic_and_service(graph: Graph) -> None:
    with stub_node("prompt:='first'", "trigger:=continuous"), stand_in_robot():
        chunks, status = graph.chunks(), graph.status()
        bring_up(graph)
        chunks.wait_for(lambda chunk: chunk.prompt == "first")
        assert graph.set_parameter("prompt", "by parameter") == ""
        chunks.wait_for(lambda chunk: chunk.prompt == "by parameter")
        publisher = graph.node.create_publisher(String, "/policy/prompt", RELIABLE)
        time.sleep(0.5)  # discovery
        publisher.publish(String(data="by topic"))
        chunks.wait_for(lambda chunk: chunk.prompt == "by topic")
        assert graph.get_parameter("prompt") == "by topic"
        answer = graph.call(SetPrompt, "/policy/set_prompt", SetPrompt.Request(prompt="by service"))
        assert answer.success
        chunks.wait_for(lambda chunk: chunk.prompt == "by service")
        status.wait_for(lambda s: s.prompt == "by service")
        # A change is never half in effect: in the order of the chunks each prompt follows the other once.
        prompts = [chunk.prompt for chunk in chunks]
        assert [p for i, p in enumerate(prompts) if i == 0 or prompts[i - 1] != p] == [
            "first", "by parameter", "by topic", "by service",
        ]  # fmt: skip
        for empty in ("", "  "):
            answer = graph.call(SetPrompt, "/policy/set_prompt", SetPrompt.Request(prompt=empty))
            assert not answer.success
            assert "observation.empty_prompt" in answer.message
        publisher.publish(String(data=""))
        status.wait_for(lambda s: "observation.empty_prompt" in s.last_error and s.prompt == "by service")
        # The parameter alone goes back to what the profile says.
        assert graph.set_parameter("prompt", "") == ""
        chunks.wait_for(lambda chunk: chunk.prompt == "pick up the red block")


def test_without_a_prompt_nothing_is_guessed(graph: Graph) -> None:
    # so101 brings none of its own.
    with stub_node("profile:=so101"), stand_in_robot("--profile", "so101"):
        chunks, status = graph.chunks(), graph.status()
        bring_up(graph)
        status.wait_for(lambda s: s.state == "active" and s.reason.startswith("observation.no_prompt"))
        assert not chunks
        assert graph.set_parameter("prompt", "fold the cloth") == ""
        chunks.wait_for(lambda chunk: chunk.prompt == "fold the cloth")
        status.wait_for(lambda s: s.state == "active" and s.reason == "")


def test_seeds(graph: Graph) -> None:
    with stub_node("seed:=100", "num_steps:=7", "trigger_rate_hz:=10.0"), stand_in_robot():
        chunks = graph.chunks()
        bring_up(graph)
        chunks.wait_for_count(3)
        assert [chunk.noise_seed for chunk in chunks[:3]] == [100, 101, 102]
        assert {chunk.denoise_steps for chunk in chunks} == {7}
        assert graph.set_parameter("seed", -1) == ""
        assert graph.set_parameter("num_steps", 0) == ""
        time.sleep(0.3)
        count = len(chunks)
        chunks.wait_for_count(count + 4)
        drawn = [chunk.noise_seed for chunk in chunks[count:]]
        assert len(set(drawn)) == len(drawn)
        assert min(drawn) > 10**6  # four draws of 63 bits
        assert chunks[-1].denoise_steps == 10


@pytest.mark.parametrize(
    ("fault", "reason"), [("nan", "action.nan"), ("infer_unexpected", "error.unexpected: RuntimeError: the stub broke")]
)
def test_what_the_model_must_not_answer_is_refused_aloud(graph: Graph, fault: str, reason: str) -> None:
    with stub_node(STUB_FAULT=fault) as node, stand_in_robot():
        chunks, status = graph.chunks(), graph.status()
        diagnostics = graph.record(DiagnosticArray, "/diagnostics")
        bring_up(graph)
        said = status.wait_for(lambda s: s.state == "active" and s.refused >= 4)
        assert reason in said.reason
        assert reason in said.last_error
        diagnostics.wait_for(lambda d: d.status[0].level == DiagnosticStatus.ERROR and reason in d.status[0].message)
        node.wait_for_line(f"no chunk: {reason}")
        assert not chunks
        # It lives on.
        assert graph.change_state("deactivate")
        assert graph.change_state("activate")
        status.wait_for(lambda s: s.state == "active" and 1 <= s.refused < 4, start=len(status))


def test_status_and_diagnostics_of_a_healthy_node(graph: Graph) -> None:
    with stub_node("trigger_rate_hz:=10.0"), stand_in_robot():
        status = graph.status()
        diagnostics = graph.record(DiagnosticArray, "/diagnostics")
        bring_up(graph)
        good = status.wait_for(
            lambda s: s.state == "active" and s.chunks > 20 and s.reason == "" and s.chunk_rate_hz > 9
        )
        assert good.checkpoint_id == "stub"
        assert good.profile == "demo"
        assert good.chunk_rate_hz == pytest.approx(10, rel=0.1)
        assert list(good.stage_names) == ["wait", "stub", "total"]
        assert all(p50 <= p95 for p50, p95 in zip(good.stage_p50_ms, good.stage_p95_ms, strict=True))
        assert [s.name for s in good.streams] == ["base", "left_wrist", "right_wrist", "joints"]
        assert {s.state for s in good.streams} == {"live"}
        said = diagnostics.wait_for(
            lambda d: d.status[0].level == DiagnosticStatus.OK and "active" in d.status[0].message
        )
        assert [s.name for s in said.status] == [
            "policy: policy", *(f"policy: input {s.name}" for s in good.streams)
        ]  # fmt: skip
        # At 1 Hz while nothing changes.
        count, began = len(status), time.monotonic()
        status.wait_for_count(count + 3)
        assert 2.0 < time.monotonic() - began < 3.6
