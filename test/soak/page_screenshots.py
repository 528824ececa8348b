"""Screenshots of the page in a real browser, with the built-in policy at work behind it.

    python test/soak/page_screenshots.py [--folder docs/images]

Needs Debian's chromium.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[1]))
from serving_stubs import http

import pi05_ros
from pi05_ros.engine.scheduler import ControlLoop, Scheduler
from pi05_ros.observation import Observation
from pi05_ros.policy import load_policy
from pi05_ros.serving.app import Server
from pi05_ros.serving.facts import PolicyFacts
from pi05_ros.serving.settings import ServerSettings

SIZES = {"page_desktop": (1280, 1000), "page_phone": (390, 1900)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path(__file__).parents[2] / "docs" / "images")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)

    policy = load_policy(None, "demo", device="cpu")
    scheduler = Scheduler()
    scheduler.start()
    facts = PolicyFacts.of(policy.contract, policy.checkpoint, dtype="float32", device="cpu")
    server = Server(facts, scheduler, ServerSettings(port=0))
    server.start()
    scheduler.activate(policy)
    photos = sorted((Path(pi05_ros.__file__).parent / "assets" / "photos").glob("*.jpg"))
    frames = [np.array(Image.open(photo).convert("RGB")) for photo in photos[:3]]
    images = dict(zip(("base", "left_wrist", "right_wrist"), frames, strict=True))
    stop = threading.Event()

    def work() -> None:
        phase = 0.0
        while not stop.wait(0.04):
            phase += 0.1
            state = 0.5 * np.sin(np.arange(7) + phase)
            ControlLoop(scheduler).infer(Observation(images, state, "pick up the red block"))
            server.publish_ages({"base": 0.012, "left_wrist": 0.021, "right_wrist": 0.033, "joints": 0.004})

    worker = threading.Thread(target=work)
    worker.start()
    try:
        http(server, "/v1/actions/generations", {"observation.state": [0.0] * 7})
        stop.wait(3.0)
        for name, (width, height) in SIZES.items():
            picture = folder / f"{name}.png"
            browser = ["chromium", "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
            browser += [f"--window-size={width},{height}", "--virtual-time-budget=4000", f"--screenshot={picture}"]
            subprocess.run([*browser, server.url], check=True, capture_output=True, timeout=120)
            print(picture)
    finally:
        stop.set()
        worker.join()
        server.stop()
        scheduler.stop(5.0)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
