"""Who may import whom: the core knows no ROS, the network no robots (docs/architecture.md, "Import rules").

Read from the source, imports inside functions too. (import-linter misses pi05_ros.msg, which only a build makes.)
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "pi05_ros"
ROS = {
    "rclpy", "ament_index_python", "builtin_interfaces", "diagnostic_msgs", "geometry_msgs", "launch", "launch_ros",
    "lifecycle_msgs", "rcl_interfaces", "rosidl_runtime_py", "sensor_msgs", "std_msgs", "std_srvs", "trajectory_msgs",
    "cv_bridge", "message_filters", "pi05_ros.msg", "pi05_ros.srv",
}  # fmt: skip
ROOMS = {path.name for path in PACKAGE.iterdir() if path.is_dir() and (path / "__init__.py").is_file()}
CORE = ("model", "transforms", "checkpoint", "engine")


def imports(path: Path) -> Iterator[str]:
    """Names that a module imports; ``from a import b`` gives ``a`` and ``a.b``."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports are not used here"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif (
            isinstance(node, ast.Call)
            and "import_module" in ast.dump(node.func)
            and node.args
            and isinstance(node.args[0], ast.Constant)
        ):
            yield str(node.args[0].value)


def offences(room: str, forbidden: set[str]) -> list[str]:
    """Modules under ``room`` ("" for the whole package) that import something of ``forbidden`` or below it."""
    return sorted(
        f"{path.relative_to(PACKAGE.parent)} imports {name}"
        for path in (PACKAGE / room).rglob("*.py")
        for name in imports(path)
        if any(name == prefix or name.startswith(f"{prefix}.") for prefix in forbidden)
    )


def test_only_the_node_imports_ros() -> None:
    ros = offences("", ROS)
    assert any("pi05_ros/node/" in line for line in ros), "the rule would hold for want of any import"
    assert [line for line in ros if "pi05_ros/node/" not in line] == []


@pytest.mark.parametrize("room", CORE)
def test_the_core_imports_no_door(room: str) -> None:
    assert offences(room, {"pi05_ros.node", "pi05_ros.serving", "pi05_ros.cli", "pi05_ros.tools"}) == []


def test_the_network_doors_import_no_node() -> None:
    assert offences("serving", {"pi05_ros.node"}) == []


def test_the_model_imports_only_errors() -> None:
    others = {f"pi05_ros.{path.stem}" for path in PACKAGE.glob("*.py")} | {f"pi05_ros.{room}" for room in ROOMS}
    assert offences("model", others - {"pi05_ros.model", "pi05_ros.errors", "pi05_ros.__init__"}) == []
