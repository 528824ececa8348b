"""How an engine is set up, and the presets of config/presets/."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from pi05_ros.engine.placement import Placement, Residence
from pi05_ros.engine.requests import Switch
from pi05_ros.errors import ConfigurationError
from pi05_ros.paths import config_dir


@dataclass(frozen=True)
class EngineSettings:
    """
    Attributes:
        cuda_graph: ``auto`` captures in idle moments, True at a shape's first request, False never.
        compile: ``default`` fuses the layers' small operations with torch.compile.
        prompt_bucket: prompt lengths are rounded up to multiples of this; one plan for each.
        max_plans: shapes whose buffers and graphs are kept.
        prefix_cache_entries, prefix_cache_mb: bounds of the exact prefix cache; 0 entries: off.
        placement: where weights live; ``None`` lets ``memory_budget_gb`` decide.
        memory_budget_gb: of the device, in 2**30 bytes; ``None``: all that is free.
    """

    cuda_graph: Switch = "auto"
    compile: Literal["off", "default"] = "off"
    prompt_bucket: int = 16
    max_plans: int = 8
    prefix_cache_entries: int = 0
    prefix_cache_mb: float = 1024.0
    placement: Placement | None = None
    memory_budget_gb: float | None = None

    def __post_init__(self) -> None:
        problems = []
        if self.cuda_graph not in (True, False, "auto"):
            problems.append(f"cuda_graph: true, false or auto expected, got {self.cuda_graph!r}")
        if self.compile not in ("off", "default"):
            problems.append(f"compile: off or default expected, got {self.compile!r}")
        for name, least in (("prompt_bucket", 1), ("max_plans", 1), ("prefix_cache_entries", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                problems.append(f"{name}: a whole number of at least {least} expected, got {value!r}")
        for name in ("prefix_cache_mb", "memory_budget_gb"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0):
                problems.append(f"{name}: a positive number expected, got {value!r}")
        if problems:
            raise ConfigurationError("engine", "; ".join(problems))

    @classmethod
    def from_mapping(cls, content: dict[str, Any], source: str) -> EngineSettings:
        """Settings from a YAML file's content; ``placement`` is a map of `Placement`'s fields.

        Raises:
            ConfigurationError: ``config.engine``.
        """
        given = dict(content)
        _refuse_unknown(given, cls, source)
        if given.get("placement") is not None:
            given["placement"] = _placement(given["placement"], source)
        return cls(**given)


def load_preset(name: str | Path) -> EngineSettings:
    """Settings of a preset by name, or of a YAML file by path.

    Raises:
        ConfigurationError: ``config.preset`` or ``config.engine``.
    """
    folder = config_dir() / "presets"
    path = Path(name).expanduser() if str(name).endswith((".yaml", ".yml")) else folder / f"{name}.yaml"
    if not path.is_file():
        known = sorted(one.stem for one in folder.glob("*.yaml"))
        raise ConfigurationError("preset", f"engine preset {str(name)!r}: one of {known} or a YAML file expected")
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ConfigurationError("engine", f"{path}: a map of engine settings expected, got {type(content).__name__}")
    return EngineSettings.from_mapping(content, str(path))


def _placement(content: Any, source: str) -> Placement:
    if not isinstance(content, dict):
        raise ConfigurationError("engine", f"{source}: placement: a map expected, got {content!r}")
    _refuse_unknown(content, Placement, f"{source}: placement")
    choices = {name: get_args(Residence) for name in ("vision", "language", "expert")}
    choices["token_embedding"] = ("resident", "host")
    for name, allowed in choices.items():
        if content.get(name, allowed[0]) not in allowed:
            raise ConfigurationError(
                "engine", f"{source}: placement.{name}: one of {list(allowed)} expected, got {content[name]!r}"
            )
    count = content.get("language_layers")
    if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 0):
        raise ConfigurationError(
            "engine", f"{source}: placement.language_layers: a whole number expected, got {count!r}"
        )
    return Placement(**content)


def _refuse_unknown(content: dict[str, Any], kind: Any, source: str) -> None:
    known = [one.name for one in fields(kind)]
    unknown = sorted(set(content) - set(known), key=str)
    if unknown:
        raise ConfigurationError("engine", f"{source}: {unknown} unknown; known are {known}")
