"""``pi05-ros infer``: ask a running server for one action chunk."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from pi05_ros.client import Client
from pi05_ros.errors import ConfigurationError
from pi05_ros.serving.settings import read_api_key
from pi05_ros.transforms.encoded_images import decode_image


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default="ws://127.0.0.1:8000", help="of the server (default: %(default)s)")
    parser.add_argument(
        "--image", action="append", default=[], metavar="CAMERA=FILE", help="JPEG or PNG of a camera; may be repeated"
    )
    parser.add_argument("--state", default="", metavar="X,X,...", help="robot state, numbers separated by commas")
    parser.add_argument("--prompt", help="instruction; the profile's own if not given")
    parser.add_argument("--seed", type=int, help="of the initial noise")
    parser.add_argument("--steps", type=int, help="denoise steps; the checkpoint's if not given")
    parser.add_argument("--api-key-file", type=Path, help="file with the key; else PI05_ROS_API_KEY")
    parser.add_argument("--timeout", type=float, default=30.0, help="seconds (default: %(default)s)")
    parser.add_argument("--metadata", action="store_true", help="print what the server says of itself, and ask nothing")
    parser.add_argument("--json", action="store_true", help="print the reply as JSON")


def run(options: argparse.Namespace) -> int:
    """Print the chunk's rows, or the reply as JSON."""
    with Client(options.url, read_api_key(options.api_key_file), options.timeout) as client:
        metadata = client.metadata()
        if options.metadata:
            print(json.dumps(metadata, indent=2, default=_plain))
            return 0
        started = time.monotonic()
        reply = client.infer(_request(options))
        elapsed_ms = (time.monotonic() - started) * 1e3
    if options.json:
        print(json.dumps(reply, default=_plain))
        return 0
    _print(reply, metadata, elapsed_ms)
    return 0


def _request(options: argparse.Namespace) -> dict[str, Any]:
    request: dict[str, Any] = {}
    for given in options.image:
        camera, equals, file = given.partition("=")
        if not equals or not camera:
            raise ConfigurationError("image", f"--image: CAMERA=FILE expected, got {given!r}")
        try:
            data = Path(file).expanduser().read_bytes()
        except OSError as error:
            raise ConfigurationError("image", f"--image {camera}: {file} cannot be read: {error.strerror}") from error
        request[f"observation.images.{camera}"] = decode_image(data, file)
    if options.state:
        try:
            request["observation.state"] = np.array([float(part) for part in options.state.split(",")], np.float64)
        except ValueError:
            raise ConfigurationError("state", f"--state: numbers and commas expected, got {options.state!r}") from None
    for key, value in (("prompt", options.prompt), ("seed", options.seed), ("num_inference_steps", options.steps)):
        if value is not None:
            request[key] = value
    return request


def _print(reply: dict[str, Any], metadata: dict[str, Any], elapsed_ms: float) -> None:
    actions = np.asarray(reply["actions"])
    described = metadata.get("action") or [{"name": f"action_{column}"} for column in range(actions.shape[1])]
    step = metadata.get("step_time_s")
    print(f"{len(actions)} steps of {step * 1e3:g} ms" if step else f"{len(actions)} steps", end=", ")
    print(f"{elapsed_ms:.1f} ms, {reply.get('policy_timing', {}).get('infer_ms', 0.0):.1f} ms of them the policy")
    width = max(len(one["name"]) for one in described)
    for column, one in enumerate(described):
        values = actions[:, column]
        kind = f"{one.get('control_mode', '')} [{one.get('unit', '')}]"
        ends = f"{values[0]:+9.4f} -> {values[-1]:+9.4f}"
        print(f"{one['name']:<{width}}  {ends}  {values.min():+9.4f} to {values.max():+9.4f}  {kind}")


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} in a reply")
