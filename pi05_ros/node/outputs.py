"""What the node says: chunk, status and diagnostics messages made from plain values."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
from builtin_interfaces.msg import Duration, Time
from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus, KeyValue

from pi05_ros.msg import ActionChunk as ActionChunkMessage
from pi05_ros.msg import PolicyStatus, StreamStatus
from pi05_ros.node.inference import Answer, Figures, Reason
from pi05_ros.synchronizer import StreamReport

_NS = 1_000_000_000


@dataclass(frozen=True)
class Status:
    """All that the status topic and the diagnostics are made from."""

    stamp_ns: int
    state: str
    reason: Reason | None
    failed: bool  # the reason is an error, not a step of the lifecycle that has yet to be taken
    checkpoint_id: str
    profile: str
    prompt: str
    figures: Figures
    streams: Sequence[StreamStatus]
    last_error: str
    last_error_ns: int

    @property
    def changes(self) -> tuple[object, ...]:
        """What is published at once when it changes; everything else waits for the next second."""
        code = self.reason and self.reason[0]
        streams = tuple(stream.state for stream in self.streams)
        return (self.state, code, self.checkpoint_id, self.profile, self.prompt, self.last_error, streams)


def time_message(stamp_ns: int) -> Time:
    return Time(sec=stamp_ns // _NS, nanosec=stamp_ns % _NS)


def chunk_message(answer: Answer, frame_id: str = "") -> ActionChunkMessage:
    """The message of one answer; see ActionChunk.msg for every field."""
    chunk = answer.chunk
    message = ActionChunkMessage()
    message.header.stamp = time_message(chunk.stamp_ns or 0)
    message.header.frame_id = frame_id
    step_ns = round((chunk.step_time_s or 0.0) * _NS)
    message.step_time = Duration(sec=step_ns // _NS, nanosec=step_ns % _NS)
    message.names = list(chunk.names)
    message.units = list(chunk.units)
    message.control_modes = list(chunk.control_modes)
    message.horizon = chunk.horizon
    message.action_dim = chunk.action_dim
    # An array of the field's own type is taken as it is; an ndarray would be checked element by element.
    actions = array("f")
    actions.frombytes(np.ascontiguousarray(chunk.actions, dtype=np.float32).tobytes())
    message.actions = actions
    message.executed_steps = chunk.executed_steps or 0
    message.prompt = chunk.prompt or ""
    message.chunk_index = answer.index
    message.checkpoint_id = chunk.checkpoint_id
    message.profile = chunk.profile
    message.denoise_steps = chunk.denoise_steps
    message.noise_seed = chunk.noise_seed or 0
    message.input_names = list(chunk.input_stamps_ns)
    message.input_stamps = [time_message(stamp) for stamp in chunk.input_stamps_ns.values()]
    message.input_ages = array("d", [(answer.started_ns - s) / _NS for s in chunk.input_stamps_ns.values()])
    message.stage_names = list(answer.stage_ms)
    message.stage_ms = array("f", answer.stage_ms.values())
    message.cache_hit = chunk.cache_hit
    message.guard_flags = list(chunk.guard_flags)
    message.clamp_count = chunk.clamp_count
    message.rtc_delay = -1 if chunk.rtc_delay is None else chunk.rtc_delay
    return message


def stream_message(report: StreamReport) -> StreamStatus:
    """The message of one input stream's report: the same fields."""
    return StreamStatus(**asdict(report))


def status_message(status: Status) -> PolicyStatus:
    """The status message; see PolicyStatus.msg for every field."""
    figures = status.figures
    message = PolicyStatus()
    message.header.stamp = time_message(status.stamp_ns)
    message.state = status.state
    message.reason = sentence(status.reason)
    message.checkpoint_id = status.checkpoint_id
    message.profile = status.profile
    message.prompt = status.prompt
    message.chunks = figures.chunks
    message.refused = figures.refused
    message.chunk_rate_hz = figures.chunk_rate_hz
    message.streams = list(status.streams)
    message.stage_names = [name for name, _, _ in figures.stages]
    message.stage_p50_ms = array("f", [p50 for _, p50, _ in figures.stages])
    message.stage_p95_ms = array("f", [p95 for _, _, p95 in figures.stages])
    message.clamp_count = figures.clamp_count
    message.last_error = status.last_error
    message.last_error_stamp = time_message(status.last_error_ns)
    return message


def diagnostics_message(status: Status, node_name: str) -> DiagnosticArray:
    """One entry for the node and one for each input stream; errors stand first in an aggregator's eyes."""
    figures = status.figures
    level = DiagnosticStatus.OK
    if status.failed:
        level = DiagnosticStatus.ERROR
    elif status.reason is not None:
        level = DiagnosticStatus.WARN if status.state == "active" else DiagnosticStatus.OK
    values = {
        "state": status.state,
        "checkpoint": status.checkpoint_id,
        "profile": status.profile,
        "prompt": status.prompt,
        "chunks": str(figures.chunks),
        "refused": str(figures.refused),
        "clamped values": str(figures.clamp_count),
        "chunk rate (Hz)": f"{figures.chunk_rate_hz:.2f}",
        "last error": status.last_error,
    }
    for name, p50, p95 in figures.stages:
        values[f"{name} p50/p95 (ms)"] = f"{p50:.2f} / {p95:.2f}"
    message = DiagnosticArray()
    message.header.stamp = time_message(status.stamp_ns)
    summary = sentence(status.reason) or f"{status.state}, {figures.chunk_rate_hz:.1f} chunks/s"
    message.status = [_entry(f"{node_name}: policy", level, summary, node_name, values)]
    for stream in status.streams:
        bad = {"dead": DiagnosticStatus.ERROR, "stale": DiagnosticStatus.WARN, "waiting": DiagnosticStatus.WARN}
        message.status.append(
            _entry(
                f"{node_name}: input {stream.name}",
                bad.get(stream.state, DiagnosticStatus.OK),
                f"{stream.state} on {stream.topic}" + (f"; {stream.last_error}" if stream.last_error else ""),
                node_name,
                {
                    "topic": stream.topic,
                    "rate (Hz)": f"{stream.rate_hz:.1f}",
                    "age (s)": f"{stream.age:.3f}",
                    "received": str(stream.received),
                    "dropped": str(stream.dropped),
                },
            )
        )
    return message


def sentence(reason: Reason | None) -> str:
    """``code: sentence``, or empty."""
    return "" if reason is None else f"{reason[0]}: {reason[1]}"


def _entry(name: str, level: bytes, summary: str, hardware: str, values: dict[str, str]) -> DiagnosticStatus:
    pairs = [KeyValue(key=key, value=value) for key, value in values.items()]
    return DiagnosticStatus(level=level, name=name, message=summary, hardware_id=hardware, values=pairs)
