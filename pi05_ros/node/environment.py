"""What ROS needs around it: a Python that fits, a Fast DDS profile that carries images, no way to another robot.

All of it must be in place before ``rclpy.init``; nothing here imports rclpy.
"""

from __future__ import annotations

import fcntl
import os
import platform
import random
import re
import socket
import sys
import tempfile
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO

from pi05_ros.errors import ConfigurationError
from pi05_ros.paths import share_dir

# Fast DDS 2 (Jazzy) reads the first and nothing else; Fast DDS 3 (Kilted) the second, and warns about the first.
PROFILE_VARIABLES = ("FASTRTPS_DEFAULT_PROFILES_FILE", "FASTDDS_DEFAULT_PROFILES_FILE")
# Who sets one of these has chosen a transport; a profile of ours would overrule it.
TRANSPORT_VARIABLES = (*PROFILE_VARIABLES, "FASTDDS_BUILTIN_TRANSPORTS")
# Each of these can lead to another machine in spite of LOCALHOST, or out of Fast DDS altogether.
ESCAPE_VARIABLES = ("ROS_STATIC_PEERS", "ROS_DISCOVERY_SERVER", "ROS_LOCALHOST_ONLY", "RMW_IMPLEMENTATION")

# RTPS 2.5, section 9.6.2: the ports of a domain start at 7400 + 250 * id. Above 101 they meet Linux's ephemeral ports.
_DOMAIN_IDS = range(1, 102)
_held: list[IO[str]] = []


def missing_ros(error: ImportError) -> ConfigurationError | None:
    """What a failed import of ROS means for people: which Python runs, and which one ROS is for.

    ``None`` where it was not rclpy or its compiled part that failed.
    """
    if (error.name or "").partition(".")[0] != "rclpy" and "rclpy" not in str(error):
        return None
    # A sourced distribution puts its folder, named after its Python, into PYTHONPATH; the compiled part fits no other.
    found = [match[1] for path in sys.path if (match := re.search(r"/python(3\.\d+)/(?:site|dist)-packages", path))]
    ours = ".".join(platform.python_version_tuple()[:2])
    others = sorted({version for version in found if version != ours})
    what = f"the ROS on PYTHONPATH is for Python {' and '.join(others)}" if others else "no ROS is on its path"
    return ConfigurationError(
        "ros_python",
        f"rclpy cannot be imported: Python {platform.python_version()} ({sys.executable}) runs, and {what} ({error}); "
        "source the distribution's setup file and use its Python, or install the ROS wheels (scripts/setup.sh)",
    )


def dds_profile() -> Path:
    """The Fast DDS profile that gives every participant a shared-memory segment wide enough for images."""
    return share_dir() / "resource" / "fastdds.xml"


def dds_defaults(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that select the package's profile; none where the user chose a transport."""
    if any(environment.get(variable) for variable in TRANSPORT_VARIABLES):
        return {}
    return {_profile_variable(): str(dds_profile())}


def apply_dds_defaults() -> None:
    """Select the package's profile in this process unless the user chose a transport. Call it before ``rclpy.init``."""
    os.environ.update(dds_defaults(os.environ))


def free_domain_id() -> int:
    """A ROS domain that nobody on this machine uses; it stays this process's own until the process ends.

    Raises:
        ConfigurationError: ``config.no_domain`` when all of them are taken.
    """
    locks = Path(tempfile.gettempdir()) / f"pi05_ros-domains-{os.getuid()}"
    locks.mkdir(mode=0o700, exist_ok=True)
    # SystemRandom, because a seed set by a test must not make two processes try the same ids in the same order.
    for domain in random.SystemRandom().sample(_DOMAIN_IDS, len(_DOMAIN_IDS)):
        lock = (locks / str(domain)).open("w")  # held open: closing it releases the domain
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            continue
        if _ports_are_free(domain):
            _held.append(lock)
            return domain
        lock.close()
    raise ConfigurationError(
        "no_domain",
        f"a free ROS_DOMAIN_ID was expected from {_DOMAIN_IDS[0]} to {_DOMAIN_IDS[-1]}, and every one has a "
        "participant on this machine; stop some ROS processes",
    )


def isolated_environment(base: Mapping[str, str] | None = None) -> dict[str, str]:
    """A copy of ``base`` (this process's environment by default) that cannot reach any robot.

    Discovery stays on this machine, in a domain of its own, over Fast DDS with the package's profile.
    """
    environment = dict(os.environ if base is None else base)
    for variable in (*ESCAPE_VARIABLES, *TRANSPORT_VARIABLES):
        environment.pop(variable, None)
    environment["ROS_AUTOMATIC_DISCOVERY_RANGE"] = "LOCALHOST"
    environment["ROS_DOMAIN_ID"] = str(free_domain_id())
    environment.update(dds_defaults(environment))
    return environment


def _profile_variable() -> str:
    # rclpy's version tells the distribution whether or not one is sourced; Jazzy has 7, Kilted 9.
    try:
        newer = int(version("rclpy").split(".")[0]) > 7
    except PackageNotFoundError:
        newer = True
    return PROFILE_VARIABLES[newer]


def _ports_are_free(domain: int) -> bool:
    # 7400: multicast discovery; 7410, 7412, ...: unicast discovery of the participants 0, 1, ...
    base = 7400 + 250 * domain
    for port in (base, *range(base + 10, base + 30, 2)):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.bind(("", port))
            except OSError:
                return False
    return True
