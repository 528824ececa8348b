"""Run by the published openpi-client's own interpreter: drives one server as a robot would, and fails loudly.

python openpi_client_session.py PROFILE PORT INFERENCES
"""

from __future__ import annotations

import sys

import numpy as np
from openpi_client.action_chunk_broker import ActionChunkBroker
from openpi_client.websocket_client_policy import WebsocketClientPolicy


def observation(profile: str, value: float) -> dict:
    """What this robot's OpenPI example sends; the first state number is ``value``."""

    def numbers(width: int) -> np.ndarray:
        state = np.zeros(width)
        state[0] = value
        return state

    frame = np.random.default_rng().integers(0, 256, (224, 224, 3), np.uint8)
    if profile == "aloha":
        names = ("cam_high", "cam_low", "cam_left_wrist", "cam_right_wrist")
        images = {name: np.ascontiguousarray(frame.transpose(2, 0, 1)) for name in names}
        return {"state": numbers(14), "images": images, "prompt": "do something"}
    if profile == "droid":
        return {
            "observation/exterior_image_1_left": frame,
            "observation/wrist_image_left": frame,
            "observation/joint_position": numbers(7),
            "observation/gripper_position": np.zeros(1),
            "prompt": "do something",
        }
    if profile == "libero_openpi":
        return {
            "observation/image": frame,
            "observation/wrist_image": frame,
            "observation/state": numbers(8),
            "prompt": "do something",
        }
    return {
        "base_rgb": frame,
        "wrist_rgb": frame,
        "joints": numbers(6),
        "gripper": np.float32(0.5),
        "prompt": "do something",
    }


def main() -> None:
    profile, port, inferences = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    assert np.__version__.startswith("1."), np.__version__
    policy = WebsocketClientPolicy(port=port)  # to 0.0.0.0, its default
    metadata = policy.get_server_metadata()
    assert metadata["profile"]["name"] == profile, metadata
    horizon = metadata["action_horizon"]
    for index in range(inferences):
        reply = policy.infer(observation(profile, index))
        actions = reply["actions"]
        assert actions.shape == (horizon, len(metadata["action_names"])) and actions.dtype == np.float32
        assert actions[0, 0] == index, (index, actions[0, 0])
        assert reply["server_timing"]["infer_ms"] >= 0 and reply["policy_timing"]["infer_ms"] >= 0
        if index % 50 == 10:
            try:
                policy.infer({"state": np.zeros(3), "prompt": "do something"})
            except RuntimeError as error:
                assert "observation.keys" in str(error) and profile in str(error), error
                assert "Traceback" not in str(error)
            else:
                raise AssertionError("a bad observation was answered")
    broker = ActionChunkBroker(policy, horizon)
    for step in range(2 * horizon):
        chunk = step // horizon
        action = broker.infer(observation(profile, 100.0 * chunk))
        assert action["actions"].shape == (len(metadata["action_names"]),)
        assert action["actions"][0] == 100.0 * chunk + step % horizon
    policy.reset()
    print("ok", inferences)


if __name__ == "__main__":
    main()
