"""The command line: help without heavy imports, errors with a message and an exit status, the profile tool."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from pi05_ros.cli import COMMANDS, main


def test_help_lists_every_command_and_loads_neither_torch_nor_ros():
    code = (
        "import sys\n"
        "from pi05_ros.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit as end:\n    assert end.code == 0\n"
        "assert not {'torch', 'rclpy'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    for command in COMMANDS:
        assert command in done.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as end:
        main([command, "--help"])
    assert end.value.code == 0
    assert "usage: pi05-ros" in capsys.readouterr().out


def test_profiles_are_listed_shown_and_checked(capsys: pytest.CaptureFixture[str]):
    assert main(["profile", "list"]) == 0
    listed = capsys.readouterr().out
    assert "aloha" in listed and "raw" in listed
    assert main(["profile", "show", "so101"]) == 0
    assert "shoulder_pan" in capsys.readouterr().out
    assert main(["profile", "check", "demo"]) == 0
    assert "base -> base_0_rgb" in capsys.readouterr().out
    assert main(["profile", "check", "raw"]) == 0


def test_what_does_not_fit_is_said_on_stderr_with_status_2(capsys: pytest.CaptureFixture[str]):
    assert main(["profile", "check", "aloha"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("pi05-ros profile: contract.") and "aloha" in said.err and "builtin" in said.err


def test_unknown_command_is_refused(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as end:
        main(["fly"])
    assert end.value.code == 2
    assert "fly" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("path", "said"),
    [
        # As a sourced distribution looks from another Python: the package is there, its compiled part is not.
        ("lib/python3.42/site-packages", "the ROS on PYTHONPATH is for Python 3.42"),
        ("elsewhere", "no ROS is on its path"),
    ],
)
def test_a_python_that_does_not_fit_ros_is_named_with_its_version(tmp_path: Path, path: str, said: str):
    package = tmp_path / path / "rclpy"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("from rclpy import _rclpy_pybind11\n")
    command = [sys.executable, "-m", "pi05_ros.cli", "node"]
    environment = {**os.environ, "PYTHONPATH": f"{package.parent}:{Path(__file__).parents[1]}"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert "config.ros_python" in done.stderr and said in done.stderr
    assert f"Python {platform.python_version()}" in done.stderr
    assert "Traceback" not in done.stderr
