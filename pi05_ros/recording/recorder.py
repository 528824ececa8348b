"""Writes observation and chunk of every inference to mcap bags, bounded in size, in a thread of its own."""

from __future__ import annotations

import queue
import shutil
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rosbags.rosbag2 import StoragePlugin, Writer

from pi05_ros.errors import ConfigurationError
from pi05_ros.observation import Observation
from pi05_ros.profile import Profile
from pi05_ros.recording.bag import CHUNK, NS, typestore

_PARTS = 4  # bags that together fill the bound; the oldest goes when a new one begins
_QUEUE = 8


class Recorder:
    """Keeps the last ``max_bytes`` of what was asked and answered.

    Pictures and joint states are written on the profile's topics, with the stamps of the inputs; so a recording is
    read like any other bag. What comes while the queue is full is dropped and counted: recording never delays a chunk.

    Args:
        folder: for the bags; created.

    Raises:
        ConfigurationError: ``config.record``.
    """

    def __init__(self, folder: Path, profile: Profile, max_bytes: int, chunk_topic: str) -> None:
        self.dropped = 0
        self.written = 0
        self.error = ""
        self._profile, self._chunk_topic = profile, chunk_topic
        self._part_bytes = max_bytes // _PARTS
        self._folder = folder.expanduser() / time.strftime("pi05_%Y%m%d_%H%M%S")
        try:
            self._folder.mkdir(parents=True)
        except OSError as error:
            raise ConfigurationError("record", f"record: a folder to write to expected: {error}") from error
        self._bags: deque[Path] = deque()
        self._writer: Writer | None = None
        self._bytes = 0
        self._started = 0
        self._queue: queue.Queue[tuple[Observation, bytes] | None] = queue.Queue(_QUEUE)
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)
        self._thread.start()

    @property
    def folder(self) -> Path:
        return self._folder

    def put(self, observation: Observation, chunk: bytes) -> None:
        """Hand over one inference; ``chunk`` is the serialised ActionChunk message. Never waits."""
        try:
            self._queue.put_nowait((observation, chunk))
        except queue.Full:
            self.dropped += 1

    def close(self) -> None:
        """Write what waits and finish the bag."""
        self._queue.put(None)
        self._thread.join(10.0)

    def _run(self) -> None:
        try:
            while (item := self._queue.get()) is not None:
                self._write(*item)
                self.written += 1
        except Exception as error:  # a full disk must not end the policy
            self.error = f"{type(error).__name__}: {error}"
            while self._queue.get() is not None:
                self.dropped += 1
        finally:
            if self._writer is not None:
                self._writer.close()

    def _begin(self) -> Writer:
        if self._writer is not None:
            self._writer.close()
        while len(self._bags) >= _PARTS:
            shutil.rmtree(self._bags.popleft(), ignore_errors=True)
        path = self._folder / f"part_{self._started:04d}"
        self._started += 1
        self._bags.append(path)
        self._writer, self._bytes = Writer(path, version=9, storage_plugin=StoragePlugin.MCAP), 0
        self._writer.open()
        self._connections = {
            topic: self._writer.add_connection(topic, kind, typestore=typestore())
            for topic, kind in self._topics().items()
        }
        return self._writer

    def _topics(self) -> dict[str, str]:
        cameras = [camera.topic for camera in self._profile.cameras.values() if camera.topic]
        sources = [source.topic for source in self._profile.state.sources.values()]
        topics = {_absolute(topic): "sensor_msgs/msg/Image" for topic in cameras}
        topics |= {_absolute(topic): "sensor_msgs/msg/JointState" for topic in sources}
        return {**topics, self._chunk_topic: CHUNK}

    def _write(self, observation: Observation, chunk: bytes) -> None:
        writer = self._writer
        if writer is None or self._bytes > self._part_bytes:
            writer = self._begin()
        now = time.time_ns()
        for topic, kind, message in self._inputs(observation):
            raw = typestore().serialize_cdr(message, kind)
            writer.write(self._connections[topic], now, raw)
            self._bytes += len(raw)
        writer.write(self._connections[self._chunk_topic], now, chunk)
        self._bytes += len(chunk)

    def _inputs(self, observation: Observation) -> Iterator[tuple[str, str, Any]]:
        """(topic, type, message) of every input."""
        types = typestore().types
        header, stamp_type = types["std_msgs/msg/Header"], types["builtin_interfaces/msg/Time"]

        def head(name: str) -> Any:
            stamp = observation.input_stamps_ns[name]
            return header(stamp=stamp_type(sec=stamp // NS, nanosec=stamp % NS), frame_id=name)

        image, joints = types["sensor_msgs/msg/Image"], types["sensor_msgs/msg/JointState"]
        for name, pixels in observation.images.items():
            topic = self._profile.cameras[name].topic
            if topic is None:
                continue
            height, width = pixels.shape[:2]
            data = np.ascontiguousarray(pixels).reshape(-1)
            message = image(head(name), height, width, "rgb8", 0, 3 * width, data)
            yield _absolute(topic), "sensor_msgs/msg/Image", message
        for source, publisher in self._profile.state.sources.items():
            mine = [i for i, dim in enumerate(self._profile.state.dims) if self._profile.source_of(dim) == source]
            values = {field: np.zeros(len(mine)) for field in ("position", "velocity", "effort")}
            for place, index in enumerate(mine):
                values[self._profile.state.dims[index].field][place] = observation.state[index]
            names = [self._profile.state.dims[index].joint_name for index in mine]
            message = joints(head(source), names, values["position"], values["velocity"], values["effort"])
            yield _absolute(publisher.topic), "sensor_msgs/msg/JointState", message


def _absolute(topic: str) -> str:
    return topic if topic.startswith("/") else f"/{topic}"
