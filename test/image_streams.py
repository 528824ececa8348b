"""Run as a process: three raw 640x480 rgb8 streams at 30 Hz, published or received, counted as one JSON line."""

from __future__ import annotations

import array
import json
import sys
import time
from functools import partial

import rclpy
from rclpy.qos import QoSProfile, ReliabilityPolicy
from sensor_msgs.msg import Image

WIDTH, HEIGHT, RATE_HZ, FRAMES = 640, 480, 30.0, 120
TOPICS = tuple(f"camera_{i}/image_raw" for i in range(3))
# Best effort as camera drivers publish; deep, so that a pause of this process does not count as a transport loss.
QOS = QoSProfile(depth=30, reliability=ReliabilityPolicy.BEST_EFFORT)
DEADLINE_S = 40.0


def pixels(stream: int, frame: int) -> array.array[int]:
    return array.array("B", bytes([stream, frame]) * (WIDTH * HEIGHT * 3 // 2))


def publish() -> None:
    node = rclpy.create_node("image_source")
    publishers = [node.create_publisher(Image, topic, QOS) for topic in TOPICS]
    deadline = time.monotonic() + DEADLINE_S
    while any(publisher.get_subscription_count() == 0 for publisher in publishers):
        if time.monotonic() > deadline:
            sys.exit("no subscriber came")
        time.sleep(0.05)
    time.sleep(0.5)  # this side has matched; give the other side the time to do so too
    start = time.monotonic()
    for frame in range(FRAMES):
        time.sleep(max(0.0, start + frame / RATE_HZ - time.monotonic()))
        for stream, publisher in enumerate(publishers):
            message = Image(height=HEIGHT, width=WIDTH, encoding="rgb8", step=WIDTH * 3, data=pixels(stream, frame))
            message.header.frame_id = str(frame)
            publisher.publish(message)
    print(json.dumps({"seconds": time.monotonic() - start}))
    sys.stdout.flush()
    sys.stdin.readline()  # stay until the receiver has counted: a writer's segment goes with its process


def receive() -> None:
    node = rclpy.create_node("image_sink")
    intact = [0] * len(TOPICS)
    last = [-1] * len(TOPICS)

    def take(stream: int, message: Image) -> None:
        last[stream] = int(message.header.frame_id)
        intact[stream] += message.data == pixels(stream, last[stream])

    for stream, topic in enumerate(TOPICS):
        node.create_subscription(Image, topic, partial(take, stream), QOS)
    deadline = time.monotonic() + DEADLINE_S
    quiet_since = time.monotonic()
    seen = 0
    while min(last) < FRAMES - 1 and time.monotonic() < deadline:
        rclpy.spin_once(node, timeout_sec=0.1)
        if sum(intact) != seen:
            seen, quiet_since = sum(intact), time.monotonic()
        if seen and time.monotonic() - quiet_since > 3.0:
            break  # the last frame of a stream was lost
    print(json.dumps({"intact": intact}))


if __name__ == "__main__":
    rclpy.init()
    {"publish": publish, "receive": receive}[sys.argv[1]]()
    rclpy.shutdown()
