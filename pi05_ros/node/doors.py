"""The network doors of the policy node: the same policy, on the node's own inference thread."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rclpy.node import Node

from pi05_ros.chunk import ActionChunk
from pi05_ros.engine.scheduler import Answer, Scheduler, Served, Work
from pi05_ros.node.parameters import SERVE, LoadSettings
from pi05_ros.observation import Observation
from pi05_ros.playback.leftover import Continuation
from pi05_ros.profile import Profile
from pi05_ros.serving.settings import ServerSettings, read_api_key

if TYPE_CHECKING:
    from pi05_ros.policy import Policy
    from pi05_ros.serving.app import Server


@dataclass(frozen=True)
class ServeSettings:
    """What the node's ``serve.*`` parameters say.

    Attributes:
        server: the server's own settings; ``None`` where the network doors are off.
        max_queue, max_group, max_wait_ms: the scheduler's.
        served_model_names: what a request may say as ``model``.
    """

    server: ServerSettings | None
    max_queue: int
    max_group: int
    max_wait_ms: float
    served_model_names: tuple[str, ...]

    def scheduler(self) -> Scheduler:
        """The node's inference thread with its queue, not yet started."""
        return Scheduler(max_queue=self.max_queue, max_group=self.max_group, max_wait_ms=self.max_wait_ms)


def serve_settings(node: Node) -> ServeSettings:
    """Read the ``serve.*`` parameters.

    Raises:
        ConfigurationError: ``config.api_key``, ``config.tls``.
    """
    value = {spec.name.removeprefix("serve."): node.get_parameter(spec.name).value for spec in SERVE}
    server = None
    if value["enabled"]:
        server = ServerSettings(
            host=value["host"],
            port=value["port"],
            api_key=read_api_key(value["api_key_file"] or None),
            allowed_hosts=tuple(filter(None, value["allowed_hosts"])),
            tls_certificate=Path(value["tls_certificate"]).expanduser() if value["tls_certificate"] else None,
            tls_key=Path(value["tls_key"]).expanduser() if value["tls_key"] else None,
            timeout_s=value["timeout_s"],
            max_connections=value["max_connections"],
            page=value["page"],
        )
    return ServeSettings(
        server=server,
        max_queue=value["max_queue"],
        max_group=value["max_group"],
        max_wait_ms=value["max_wait_ms"],
        served_model_names=tuple(filter(None, value["served_model_names"])),
    )


def open_server(serve: ServeSettings, load: LoadSettings, profile: Profile, scheduler: Scheduler) -> Server | None:
    """Start the server; liveness, handshakes and metadata answer from now on, requests once the scheduler is active.

    Raises:
        CheckpointError, ContractError: as `pi05_ros.load_policy`, before any weights are read.
        ConfigurationError: ``config.bind``, ``config.tls``.
    """
    if serve.server is None:
        return None
    # Imported here, as the policy is: torch takes seconds, in which the node must already be up.
    from pi05_ros.checkpoint.formats import open_checkpoint
    from pi05_ros.contract import check_contract
    from pi05_ros.model.precision import resolve_dtype
    from pi05_ros.paths import builtin_checkpoint
    from pi05_ros.policy import resolve_device
    from pi05_ros.serving.app import Server
    from pi05_ros.serving.facts import PolicyFacts

    checkpoint = open_checkpoint(
        load.checkpoint or builtin_checkpoint(), load.revision, assets=load.assets, statistics=load.statistics
    )
    device = resolve_device(load.device)
    facts = PolicyFacts.of(
        check_contract(profile, checkpoint, load.normalization),
        checkpoint,
        dtype=str(resolve_dtype(load.dtype, device)).removeprefix("torch."),
        device=str(device),
        served_model_names=serve.served_model_names,
    )
    server = Server(facts, scheduler, serve.server)
    server.start()
    return server


def describe_engine(server: Server, policy: Any) -> None:
    """Tell the server's metadata what the loaded policy's engine can do."""
    engine = policy.engine
    server.describe_engine(
        prefix_cache=engine.settings.prefix_cache_entries > 0,
        cuda_graph=engine.device.type == "cuda" and engine.settings.cuda_graph is not False,
    )


class ObservedPolicy:
    """The policy as the control loop asks it, with the server's page and metrics told of every request."""

    def __init__(self, policy: Policy, scheduler: Scheduler) -> None:
        self.profile = policy.profile
        self._policy = policy
        self._scheduler = scheduler

    def infer(
        self,
        observation: Observation,
        noise: np.ndarray | None = None,
        seed: int | None = None,
        num_steps: int | None = None,
        *,
        continuing: Continuation | None = None,
    ) -> ActionChunk:
        """See `pi05_ros.policy.Policy.infer`."""
        from pi05_ros.engine.requests import InferenceOptions

        options = InferenceOptions(noise=noise, seed=seed, num_steps=num_steps)
        work = Work(observation, options, source=self, control=True)
        prepared = None
        started = time.monotonic()
        try:
            prepared = self._policy.prepare(observation)
            chunk = self._policy.answer(prepared, options, continuing)
        except Exception as error:
            self._scheduler.observe(Served(work, prepared, error=error))
            raise
        elapsed_ms = (time.monotonic() - started) * 1e3
        self._scheduler.observe(Served(work, prepared, Answer(chunk, queue_ms=0.0, infer_ms=elapsed_ms, group_size=1)))
        return chunk
