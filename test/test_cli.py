"""The command line: help without heavy imports, errors with a message and an exit status, the profile tool."""

from __future__ import annotations

import subprocess
import sys

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
