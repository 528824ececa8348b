"""The package as users install it: one version, every interface built, nothing left out by pip or colcon."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import pi05_ros

ROOT = Path(__file__).parents[1]
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def test_there_is_one_version() -> None:
    package = ElementTree.parse(ROOT / "package.xml").getroot()
    assert package.findtext("version") == pi05_ros.__version__
    assert f'version = "{pi05_ros.__version__}"' in PROJECT


def test_every_interface_file_is_built() -> None:
    listed = set(re.findall(r'"((?:msg|srv)/\w+\.(?:msg|srv))"', (ROOT / "CMakeLists.txt").read_text(encoding="utf-8")))
    assert listed == {f"{kind}/{path.name}" for kind in ("msg", "srv") for path in (ROOT / kind).iterdir()}


def test_there_is_one_command() -> None:
    scripts = [script for script in entry_points(group="console_scripts") if script.value.startswith("pi05_ros.")]
    assert [(script.name, script.value) for script in scripts] == [("pi05-ros", "pi05_ros.cli:main")]


@pytest.mark.parametrize("requirements", sorted((ROOT / "requirements").glob("ros-*.txt")), ids=lambda path: path.stem)
def test_wheels_of_ros_are_pinned(requirements: Path) -> None:
    lines = [line for line in requirements.read_text(encoding="utf-8").splitlines() if line.startswith("ros-")]
    assert len(lines) > 10
    assert [line for line in lines if not re.fullmatch(r"ros-[a-z0-9-]+==[0-9.]+", line)] == []


@pytest.mark.parametrize("how", ["pip", "colcon-symlink"])
def test_a_clean_copy_builds_and_installs_whole(how: str) -> None:
    """Plain colcon and a fresh environment are in `make check-install`."""
    environment = {**os.environ, "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}
    # Tests of ROS processes put the source tree there, which would hide the installation.
    inherited = environment.pop("PYTHONPATH", "").split(os.pathsep)
    paths = [path for path in inherited if path and ROOT not in (Path(path), *Path(path).parents)]
    if paths:
        environment["PYTHONPATH"] = os.pathsep.join(paths)
    done = subprocess.run(
        [str(ROOT / "scripts" / "check_install.sh"), sys.prefix, how],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert f"{how}: pi05_ros {pi05_ros.__version__}" in done.stdout
