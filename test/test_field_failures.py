"""docs/field_failures.md names tests that exist, at least one for each kind."""

from __future__ import annotations

import re
from pathlib import Path

TEST = Path(__file__).parent


def test_every_named_test_exists() -> None:
    rows = re.findall(
        r"^\| (?!Kind|---)(.+) \| (.+) \|$", (TEST.parent / "docs" / "field_failures.md").read_text(), re.M
    )
    assert len(rows) > 40
    for kind, named in rows:
        tests = re.findall(r"`(\w+)::(\w+)`", named)
        assert tests, f"{kind}: no test is named"
        for module, name in tests:
            source = (TEST / f"test_{module}.py").read_text(encoding="utf-8")
            assert re.search(rf"^ *def test_{name}\(", source, re.M), f"{kind}: {module}::{name} does not exist"
