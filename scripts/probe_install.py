"""Is this an installation in which everything works? Run by its Python, outside of any source tree.

usage: probe_install.py SOURCE_TREE PREFIX
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def files(folder: Path) -> set[str]:
    found = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return {str(path) for path in found if "__pycache__" not in path.parts}


def main() -> None:
    source, prefix = Path(sys.argv[1]), Path(sys.argv[2])
    executables = prefix / "lib" / "pi05_ros"
    import pi05_ros
    from pi05_ros.paths import builtin_checkpoint, share_dir

    home = Path(pi05_ros.__file__).parent
    # --symlink-install links into the source tree, so paths are compared without resolving links.
    assert prefix in home.parents, f"{home} is not the installation under {prefix}"
    assert share_dir() == prefix / "share" / "pi05_ros", f"{share_dir()} is not the installation under {prefix}"

    from rclpy.serialization import deserialize_message, serialize_message

    import pi05_ros.msg
    from pi05_ros.msg import ActionChunk, PolicyStatus, StreamStatus
    from pi05_ros.srv import SetPrompt

    assert Path(pi05_ros.msg.__file__).parent == home / "msg", f"{pi05_ros.msg.__file__} does not belong to {home}"
    chunk = ActionChunk(horizon=2, action_dim=3, actions=[float(i) for i in range(6)], noise_seed=2**64 - 1)
    assert deserialize_message(serialize_message(chunk), ActionChunk) == chunk
    status = PolicyStatus(streams=[StreamStatus(name="front", rate_hz=30.0)])
    assert deserialize_message(serialize_message(status), PolicyStatus) == status
    assert SetPrompt.Request(prompt="wave").prompt == "wave"

    # Another installation's libraries may be on the search path, and would do in silence what these do not.
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()}
    libraries = {Path(name) for name in mapped if "/libpi05_ros__" in name}
    assert any("fastrtps_c" in library.name for library in libraries), "serialised without a library of its own"
    foreign = [str(library) for library in libraries if prefix.resolve() not in library.parents]
    assert not foreign, f"libraries from outside {prefix}: {', '.join(foreign)}"

    missing = {
        *(
            f"pi05_ros/{name}"
            for name in files(source / "pi05_ros") - files(home)
            if not name.startswith(("msg/", "srv/"))
        ),
        *(f"{top}/{name}" for top in ("config", "launch") for name in files(source / top) - files(share_dir() / top)),
        *({"resource/fastdds.xml", "package.xml"} - files(share_dir())),
        *({"policy_node", "pi05-ros"} - files(executables)),
    }
    assert not missing, f"not installed: {', '.join(sorted(missing))}"
    assert builtin_checkpoint().is_dir()
    for name in ("policy_node", "pi05-ros"):
        assert os.access(executables / name, os.X_OK), f"{executables / name} is not executable"
    answer = subprocess.run(["pi05-ros", "--version"], capture_output=True, text=True, check=True).stdout.strip()
    assert answer == f"pi05_ros {pi05_ros.__version__}", answer
    print(f"{answer}: messages, {len(files(home))} files of Python and assets, {len(files(share_dir()))} in share")


main()
