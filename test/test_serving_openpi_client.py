"""The published openpi-client, unchanged and in an environment of its own (it needs numpy 1), drives our server."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from serving_stubs import serving

ROOT = Path(__file__).parents[1]
# typing-extensions: openpi-client imports it without saying so.
REQUIREMENTS = ("openpi-client==0.1.2", "numpy<2", "typing-extensions")
SESSION = Path(__file__).parent / "openpi_client_session.py"


@pytest.fixture(scope="module")
def openpi_python() -> Path:
    """The interpreter of ``.venv-openpi``, made once and kept."""
    home = ROOT / ".venv-openpi"
    python, done = home / "bin" / "python", home / "complete"
    if done.is_file() and done.read_text() == " ".join(REQUIREMENTS):
        return python
    # numpy 1 has no wheels for Python 3.13 and later.
    names = ("python3.12", "python3.11", "python3.10", "python3")
    candidates = [sys.executable, *filter(None, map(shutil.which, names))]
    test = "import sys, venv, ensurepip; sys.exit(not (3, 10) <= sys.version_info < (3, 13))"
    usable = [one for one in candidates if subprocess.run([one, "-c", test], capture_output=True).returncode == 0]
    if not usable:
        pytest.skip("openpi-client needs numpy 1, and no Python 3.10 to 3.12 is here")
    subprocess.run([usable[0], "-m", "venv", "--clear", str(home)], check=True)
    install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *REQUIREMENTS]
    subprocess.run(install, check=True, capture_output=True)
    done.write_text(" ".join(REQUIREMENTS))
    return python


@pytest.mark.parametrize("profile", ["aloha", "droid", "libero_openpi", "ur5e"])
def test_it_drives_every_robot(openpi_python: Path, profile: str) -> None:
    with serving(profile=profile) as server:
        session(openpi_python, profile, server.address[1], 200)


def test_a_new_client_works_after_a_restart(openpi_python: Path) -> None:
    with serving() as server:
        port = server.address[1]
        session(openpi_python, "aloha", port, 1)
    with serving(port=port):
        session(openpi_python, "aloha", port, 1)


def session(python: Path, profile: str, port: int, inferences: int) -> None:
    command = [str(python), str(SESSION), profile, str(port), str(inferences)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0 and ran.stdout == f"ok {inferences}\n", ran.stderr[-3000:]
