"""rosbag2 files (mcap, sqlite3) without ROS, through the rosbags library; our messages come from their .msg text."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from rosbags.highlevel import AnyReader, AnyReaderError
from rosbags.typesys import Stores, get_types_from_msg, get_typestore

from pi05_ros.errors import ConfigurationError
from pi05_ros.paths import share_dir

NS = 1_000_000_000
CHUNK = "pi05_ros/msg/ActionChunk"


@cache
def typestore() -> Any:
    """Kilted's common messages and this package's."""
    store = get_typestore(Stores.ROS2_KILTED)
    for path in sorted((share_dir() / "msg").glob("*.msg")):
        store.register(get_types_from_msg(path.read_text(encoding="utf-8"), f"pi05_ros/msg/{path.stem}"))
    return store


@contextmanager
def open_bag(path: Path) -> Iterator[AnyReader]:
    """A reader of a bag folder (with metadata.yaml) or of a single .mcap or .db3 file.

    Raises:
        ConfigurationError: ``config.bag``.
    """
    if not path.exists():
        raise ConfigurationError("bag", f"bag {path}: a rosbag2 folder, .mcap or .db3 file expected, and there is none")
    try:
        reader = AnyReader([path], default_typestore=typestore())
        reader.open()
    except (AnyReaderError, OSError, ValueError, KeyError, AssertionError) as error:
        raise ConfigurationError("bag", f"bag {path}: a rosbag2 file expected: {error}") from error
    try:
        yield reader
    finally:
        reader.close()


def messages(reader: AnyReader) -> Iterator[tuple[str, str, int, Any]]:
    """(topic, type, receive time in ns, message) in the order of recording; types nobody knows are left out."""
    known = [one for one in reader.connections if one.msgtype in reader.typestore.fielddefs]
    for connection, receive_ns, raw in reader.messages(connections=known):
        yield connection.topic, connection.msgtype, receive_ns, reader.deserialize(raw, connection.msgtype)


def stamp_ns(message: Any) -> int:
    """Header stamp, or a duration's or time's own value, in nanoseconds."""
    time = message.header.stamp if hasattr(message, "header") else message
    return int(time.sec) * NS + int(time.nanosec)


def same_topic(topic: str, wanted: str) -> bool:
    """Whether a recorded topic is the profile's, which may be relative to a namespace."""
    return topic == wanted or topic.lstrip("/") == wanted.lstrip("/") or topic.endswith("/" + wanted.lstrip("/"))
