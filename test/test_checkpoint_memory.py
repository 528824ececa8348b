"""Loading needs the model's memory once."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from pi05_ros.checkpoint.make import SIZES, write_lerobot


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 300 MB in float32, a fifth of it in one tensor, as the embedding is at full size."""
    small = SIZES["small"]
    config = replace(
        small,
        vlm=replace(small.vlm, width=1024, mlp_dim=3072, head_dim=128),
        expert=replace(small.expert, head_dim=128),
        vocab=16_000,
    )
    return write_lerobot(tmp_path_factory.mktemp("memory") / "large", config, tokenizer=False)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_peak_is_at_most_a_tenth_above_the_model(folder: Path, dtype: str) -> None:
    # A process of its own: memory that earlier tests gave back would be used again and not be seen.
    result = subprocess.run(
        [sys.executable, "-m", "pi05_ros.cli", "load-benchmark", str(folder), "--dtype", dtype],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    found = re.search(r"model ([\d.]+) GB.* ([\d.]+) x the model added", result.stdout)
    assert found is not None, result.stdout
    size, ratio = float(found[1]), float(found[2])
    assert size > (0.25 if dtype == "float32" else 0.12)
    # Below 0.9 the measurement would have missed the model itself.
    assert 0.9 <= ratio <= 1.1
