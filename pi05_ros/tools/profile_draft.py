"""A profile's first draft: what a live graph and a checkpoint tell, and a question for everything they do not.

Every open question stands in the file as a value that begins with ``?:``, which no profile may contain: the file loads
once all of them are answered, and says until then which are left.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

import yaml

from pi05_ros.checkpoint.description import Checkpoint
from pi05_ros.errors import ConfigurationError
from pi05_ros.profile import OPEN_QUESTION, ControlMode, Unit
from pi05_ros.survey import COMPRESSED, IMAGE, JOINTS, SeenTopic, Survey

# Words that drivers put into every image or joint topic and that tell nothing about which one it is.
_GENERIC = {
    "image", "image_raw", "image_color", "image_rect", "image_rect_color", "color", "rgb", "compressed", "camera",
    "joint_states", "joint_state",
}  # fmt: skip


def draft_profile(name: str, survey: Survey, checkpoint: Checkpoint) -> dict[str, Any]:
    """The content of a profile's YAML file; at least the joints' order and the rate are open questions.

    Cameras feed a slot only where their name is the slot's own (or the checkpoint's alias of it). Joints stand in the
    order in which they came; that this is the order of training nobody can know.

    Raises:
        ConfigurationError: ``config.graph`` where no picture or no joint came.
    """
    cameras, left_out = _cameras(survey, checkpoint)
    dims, sources = _state(survey)
    if not cameras or not dims:
        raise ConfigurationError(
            "graph",
            f"image and joint topics of a robot are expected, and in {survey.seconds:g} s there were {len(cameras)} "
            f"cameras that can be used and {len(dims)} joints; is it on, and is ROS_DOMAIN_ID the same?"
            + "".join(f"\n  left out: {topic}" for topic in left_out),
        )
    content: dict[str, Any] = {"name": name, "cameras": cameras}
    fed = {camera["slot"] for camera in cameras.values()}
    unfed = [slot for slot in checkpoint.cameras if slot not in fed and slot not in checkpoint.empty_cameras]
    if unfed:
        content["absent_slots"] = _ask(f"list of those of {unfed} that no camera feeds; [] where each is fed")
    if len(cameras) == 1:
        content["anchor"] = next(iter(cameras))
    else:
        content["anchor"] = _ask(f"camera whose stamps decide which inputs belong together, one of {list(cameras)}")
    content["state"] = {"order": _state_order(dims, checkpoint), "sources": sources, "dims": dims}
    content["action"] = _action(dims, checkpoint)
    content["timing"] = _timing(checkpoint)
    if checkpoint.state_in_prompt is None:
        content["model"] = {
            "state_in_prompt": _ask("true where the checkpoint was trained with the state in its prompt")
        }
    if left_out:
        content["left_out"] = _ask(f"delete this line; topics that cannot be used: {left_out}")
    return content


def write_draft(content: dict[str, Any], survey: Survey, checkpoint: Checkpoint) -> str:
    """The text of the YAML file."""
    head = [
        f"# Draft of a robot profile: {survey.seconds:g} s of a live graph, and checkpoint {checkpoint.id}.",
        f"# Answer every {OPEN_QUESTION!r}; until then this file does not load, and says what is left. Then:",
        "#   pi05-ros profile check FILE --checkpoint CHECKPOINT     against the checkpoint",
        "#   pi05-ros profile check FILE --live                      against the robot",
        "# A dimension whose unit differs from the one in training also needs model_unit, as in profile so101.",
    ]
    return "\n".join([*head, yaml.safe_dump(content, sort_keys=False, width=1000, allow_unicode=True)])


def _ask(question: str) -> str:
    return f"{OPEN_QUESTION} {question}"


def _cameras(survey: Survey, checkpoint: Checkpoint) -> tuple[dict[str, Any], list[str]]:
    """Cameras by name, and sentences about image topics that cannot be used."""
    topics = {topic: seen for topic, seen in survey.topics.items() if {IMAGE, COMPRESSED} & set(seen.types)}
    left_out = [f"{topic} ({seen.unreadable[0]})" for topic, seen in topics.items() if _only_unreadable(seen)]
    usable = {topic: seen for topic, seen in topics.items() if not _only_unreadable(seen)}
    # A camera's raw topic and the transport's compressed one beside it are two ways to the same pictures.
    ways: dict[str, list[str]] = {}
    for topic in sorted(usable):
        ways.setdefault(topic.removesuffix("/compressed"), []).append(topic)
    slots = [slot for slot in checkpoint.cameras if slot not in checkpoint.empty_cameras]
    known = {**{slot: slot for slot in slots}, **checkpoint.camera_aliases}
    cameras: dict[str, Any] = {}
    for base, name in _names(list(ways)).items():
        topic = ways[base][0]
        camera: dict[str, Any] = {
            "slot": known.get(name)
            or _ask(f"which slot does this camera feed, one of {slots}; null where the model does not see it")
        }
        if len(ways[base]) == 1:
            camera["topic"] = topic
            if COMPRESSED in usable[topic].types:
                camera["type"] = "compressed"
        else:
            camera["topic"] = _ask(f"one of {ways[base]}")
            camera["type"] = _ask("image for the raw topic, compressed for the other")
        if not any(usable[way].pictures for way in ways[base]):
            camera["unseen"] = _ask("no picture came on this topic; delete this line where that is in order")
        cameras[name] = camera
    return cameras, left_out


def _only_unreadable(seen: SeenTopic) -> bool:
    return bool(seen.unreadable) and not seen.pictures


def _state(survey: Survey) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """State dimensions and their sources."""
    topics = [topic for topic, seen in survey.topics.items() if JOINTS in seen.types]
    names = _names(topics, default="joints")
    carried = [joint for topic in topics for joint in survey.topics[topic].joints]
    units = ", ".join(get_args(Unit))
    dims: list[dict[str, Any]] = []
    for topic in topics:
        for joint, seen in survey.topics[topic].joints.items():
            alone = carried.count(joint) == 1
            dim: dict[str, Any] = {"name": joint if alone else f"{names[topic]}_{joint}"}
            if not alone:
                dim["joint"] = joint
            if len(topics) > 1:
                dim["source"] = names[topic]
            dim["unit"] = _ask(f"unit on the topic, one of {units}")
            if "position" not in seen.fields:
                dim["field"] = _ask(f"no position came for it; one of {sorted(seen.fields)}")
            dims.append(dim)
    return dims, {names[topic]: {"topic": topic} for topic in topics}


def _state_order(dims: Sequence[dict[str, Any]], checkpoint: Checkpoint) -> str:
    seen = f"{len(dims)} joints were seen"
    if checkpoint.format == "lerobot":
        width = f"the checkpoint's state has {checkpoint.state_dim} dimensions"
    else:
        width = f"the checkpoint takes up to {checkpoint.state_dim}"
    return _ask(
        f"{seen}, {width}: put dims into the order of the training data, leave out the others, delete this line"
    )


def _action(dims: Sequence[dict[str, Any]], checkpoint: Checkpoint) -> dict[str, Any]:
    names: Sequence[str]
    action: dict[str, Any] = {}
    if checkpoint.action_names is not None:
        names = checkpoint.action_names
    elif checkpoint.format == "lerobot":
        names = [_ask(f"name of action dimension {index}") for index in range(checkpoint.action_dim)]
    else:
        names = [dim["name"] for dim in dims]
        action["order"] = _ask(
            f"the checkpoint gives up to {checkpoint.action_dim} numbers and names none: put the robot's into the "
            "order of training, add what is missing, delete this line"
        )
    controls = ", ".join(get_args(ControlMode))
    units = ", ".join(get_args(Unit))
    action["dims"] = []
    for name in names:
        dim = {
            "name": name,
            "unit": _ask(f"one of {units}"),
            "control": _ask(f"what the number means to the robot, one of {controls}"),
        }
        if checkpoint.format == "openpi":
            dim["relative"] = _ask("true where the model was trained on differences to the start state, else false")
        action["dims"].append(dim)
    return action


def _timing(checkpoint: Checkpoint) -> dict[str, Any]:
    timing: dict[str, Any] = {"rate_hz": _ask("frames a second of the training data; the step time is 1 / rate_hz")}
    if checkpoint.executed_steps is None:
        horizon = checkpoint.config.horizon
        timing["executed_steps"] = _ask(f"rows of each chunk to execute before the next takes over, 1 to {horizon}")
    return timing


def _names(topics: Sequence[str], default: str = "") -> dict[str, str]:
    """Topic -> a short name of it: its words that are not generic, or all of them where that is not enough."""
    words = {topic: [word for word in topic.split("/") if word] for topic in topics}
    short = {topic: "_".join(word for word in words[topic] if word not in _GENERIC) or default for topic in topics}
    taken = list(short.values())
    return {topic: name if name and taken.count(name) == 1 else "_".join(words[topic]) for topic, name in short.items()}
