"""Where the files beside the Python code lie: a source tree, a pip installation, or a colcon workspace."""

from __future__ import annotations

from pathlib import Path

from pi05_ros.errors import ConfigurationError

_PACKAGE = Path(__file__).parent


def share_dir() -> Path:
    """The folder that holds ``config/`` and ``launch/``.

    Raises:
        ConfigurationError: ``config.no_share`` when neither a source tree nor an installation surrounds the code.
    """
    source = _PACKAGE.parent
    if (source / "package.xml").is_file() and (source / "config").is_dir():
        return source
    # Both pip and colcon install to <prefix>/lib/pythonX.Y/{site,dist}-packages/pi05_ros and <prefix>/share/pi05_ros.
    for prefix in _PACKAGE.parents:
        share = prefix / "share" / "pi05_ros"
        if (share / "config").is_dir():
            return share
    raise ConfigurationError(
        "no_share",
        f"config/ was expected beside {source} or under share/pi05_ros of a parent folder, and is in neither; "
        "install with `pip install .` or `colcon build`, or run from a source tree",
    )


def config_dir() -> Path:
    """The folder of the profiles and parameter files."""
    return share_dir() / "config"


def builtin_checkpoint() -> Path:
    """The small checkpoint in LeRobot's format that runs when none is named."""
    return _PACKAGE / "assets" / "builtin_checkpoint"
