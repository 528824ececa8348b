"""Pi0.5 vision-language-action policy for ROS 2: the node, the network doors, and a Python API without ROS."""

from __future__ import annotations

from pkgutil import extend_path
from typing import TYPE_CHECKING, Any

# Lets a source tree put first on sys.path see the generated msg/ and srv/ of the installed package.
__path__ = extend_path(__path__, __name__)
__version__ = "0.1.0"

if TYPE_CHECKING:
    from pi05_ros.chunk import ActionChunk
    from pi05_ros.errors import Pi05Error
    from pi05_ros.observation import Observation
    from pi05_ros.policy import Policy, load_policy

__all__ = ["ActionChunk", "Observation", "Pi05Error", "Policy", "load_policy"]

# Imported on first use, so that importing the messages alone does not load torch.
_HOMES = {
    "ActionChunk": "pi05_ros.chunk",
    "Observation": "pi05_ros.observation",
    "Pi05Error": "pi05_ros.errors",
    "Policy": "pi05_ros.policy",
    "load_policy": "pi05_ros.policy",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
