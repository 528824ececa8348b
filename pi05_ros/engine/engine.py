"""Runs the network: requests in, normalised action chunks out. Knows neither robots nor doors."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from pi05_ros.engine.capture import Capture, CudaGraphs
from pi05_ros.engine.modulation import ModulationTables
from pi05_ros.engine.placement import Placement, WeightPlacement
from pi05_ros.engine.plan import Plan, PlanKey, prompt_bucket
from pi05_ros.engine.prefix_cache import CacheCounters, PrefixCache, prefix_key
from pi05_ros.engine.requests import EngineResult, InferenceOptions, ModelInputs, Request, check_options
from pi05_ros.engine.settings import EngineSettings
from pi05_ros.errors import EngineError
from pi05_ros.model.pi05 import Pi05

__all__ = ["Engine", "EngineResult", "InferenceOptions", "ModelInputs"]

_LOG = logging.getLogger(__name__)
Progress = Callable[[int, int, str], None]


@dataclass
class _Kept:
    """A plan and what has been captured of it."""

    plan: Plan
    whole: Callable[[], None] | None = None
    denoise: Callable[[], None] | None = None
    unchecked: int = 2
    failed: bool = False
    clocks: list[Any] = field(default_factory=list)


class Engine:
    """Runs a network. Not thread-safe: one thread calls it.

    Args:
        model: loaded weights; the engine packs and places them, so nobody else should hold on to its parameters.
        num_steps: Euler steps where a request names none.
        revision: names the weights' content; part of every cache key.
        device: where to compute; where the weights are, if not given.
        capture: how plans are captured; CUDA graphs on a GPU, nothing on a CPU.
    """

    def __init__(
        self,
        model: Pi05,
        num_steps: int,
        settings: EngineSettings | None = None,
        *,
        revision: str = "",
        device: torch.device | None = None,
        capture: Capture | None = None,
    ) -> None:
        self.model = model
        self.num_steps = num_steps
        self.settings = settings or EngineSettings()
        self.revision = revision
        self.device = device or model.device
        model.pack()
        self.placement = WeightPlacement(model, self.settings.placement or Placement(), self.device)
        if capture is None and self.device.type == "cuda" and self.settings.cuda_graph is not False:
            capture = CudaGraphs(self.device)
        self._capture = capture if self.placement.placement.all_resident else None
        self._cache = PrefixCache(self.settings.prefix_cache_entries, int(self.settings.prefix_cache_mb * 2**20))
        self._tables = ModulationTables(model, self.placement)
        self._plans: OrderedDict[PlanKey, _Kept] = OrderedDict()
        self._pending: OrderedDict[PlanKey, None] = OrderedDict()
        self._weights_version = self._count_weight_changes()
        self._compiled = self.settings.compile == "default" and self.placement.placement.all_resident
        if self._compiled:
            _compile_layers(model)

    @property
    def cache_counters(self) -> CacheCounters:
        return self._cache.counters

    @property
    def plans(self) -> dict[PlanKey, bool]:
        """The plans that are kept, and whether each is captured."""
        return {key: kept.whole is not None for key, kept in self._plans.items()}

    def attention(self, key: PlanKey) -> str:
        """Which attention kernels a plan that is kept uses."""
        return self._plans[key].plan.attention()

    @torch.inference_mode()
    def run(self, members: Sequence[ModelInputs], options: Sequence[InferenceOptions]) -> list[EngineResult]:
        """Compute a group of requests in one pass.

        All members ask for the same number of steps, horizon and kind of real-time chunking. Where the same
        `ModelInputs` stands several times in a row (all equally often), its prefix is computed once: candidates.

        Raises:
            EngineError: ``engine.group`` where members do not fit together.
            ObservationError: options that are not usable, see `check_options`.
        """
        if not members or len(members) != len(options):
            raise EngineError("group", f"one set of options per member expected, got {len(options)} for {len(members)}")
        requests = [check_options(one, self.model.config, self.num_steps) for one in options]
        self._notice_weight_changes()
        observations, candidates = _fold(members)
        cameras = _computed_cameras(observations)
        key = self._key(observations, candidates, cameras, requests)
        started = time.perf_counter()
        kept = self._keep(key)
        kept.plan.load(observations, requests, cameras)
        cache_keys = self._cache_keys(key, observations, cameras, requests)
        entries = self._cache.get(cache_keys) if cache_keys else None
        try:
            graph = self._run_plan(kept, requests, entries, started)
        except BaseException:
            self._recover()
            raise
        if cache_keys and entries is None:
            for index, cache_key in enumerate(cache_keys):
                self._cache.put(cache_key, kept.plan.take_prefix(index))
        actions, timings = graph.actions, graph.timings_ms
        return [
            EngineResult(actions[index], one.num_steps, one.seed, dict(timings), entries is not None, graph.replayed)
            for index, one in enumerate(requests)
        ]

    def capture_pending(self) -> bool:
        """Capture one shape that was run eagerly; for idle moments of the thread that calls `run`.

        Returns:
            Whether there was one.
        """
        while self._pending:
            key, _ = self._pending.popitem(last=False)
            kept = self._plans.get(key)
            if kept is not None and kept.whole is None and not kept.failed:
                self._capture_plan(kept)
                return True
        return False

    def warm_up(self, progress: Progress | None = None) -> None:
        """Capture every shape that is waiting for it.

        Args:
            progress: called with (captured, in all, shape) before each.
        """
        total = len(self._pending)
        for done in range(total):
            if progress is not None and self._pending:
                progress(done, total, str(next(iter(self._pending))))
            if not self.capture_pending():
                break

    def weights_changed(self) -> None:
        """Forget everything that was made of the weights: graphs, modulation tables and cached prefixes."""
        self._plans.clear()
        self._pending.clear()
        self._tables.clear()
        self._cache.clear()
        self._weights_version = self._count_weight_changes()

    def _key(
        self, observations: Sequence[ModelInputs], candidates: int, cameras: Sequence[int], requests: Sequence[Request]
    ) -> PlanKey:
        kinds = {(one.num_steps, one.horizon, one.mode) for one in requests}
        slots = {(len(one.images), one.tokens.shape[0]) for one in observations}
        if len(kinds) != 1 or len(slots) != 1:
            raise EngineError(
                "group",
                "a group needs equal steps, horizon, real-time chunking, cameras and prompt width, got "
                f"{sorted(kinds)} and {sorted(slots)}",
            )
        num_steps, horizon, mode = kinds.pop()
        lengths = [_last_valid(one.token_mask) for one in observations]
        prompt = prompt_bucket(max(lengths), self.settings.prompt_bucket, observations[0].tokens.shape[0])
        complete = all(
            all(one.image_masks[camera] for camera in cameras) and bool(one.token_mask[:prompt].all())
            for one in observations
        )
        return PlanKey(
            observations=len(observations),
            candidates=candidates,
            cameras=len(cameras),
            prompt=prompt,
            masked=not complete,
            horizon=horizon,
            action_dim=self.model.config.action_dim,
            num_steps=num_steps,
            rtc=mode,
            dtype=self._dtype,
        )

    @property
    def _dtype(self) -> torch.dtype:
        return self.model.prefix.blocks[0].self_attn.dtype

    def _keep(self, key: PlanKey) -> _Kept:
        kept = self._plans.get(key)
        if kept is None:
            while len(self._plans) >= self.settings.max_plans:
                self._plans.popitem(last=False)
            kept = self._plans[key] = _Kept(Plan(self.model, key, self._tables, self.placement))
        self._plans.move_to_end(key)
        return kept

    def _cache_keys(
        self, key: PlanKey, observations: Sequence[ModelInputs], cameras: Sequence[int], requests: Sequence[Request]
    ) -> list[bytes]:
        """One per observation; empty where the cache is not to be used.

        The shape of the pass and the place in it are part of a key: another summation order would differ in the last
        bit from what a miss computes.
        """
        if not self._cache.enabled or any(one.prefix_cache is False for one in requests):
            return []
        shape = (key.observations, key.cameras, key.prompt, key.masked, str(key.dtype))
        return [
            prefix_key(one, cameras, repr((self.revision, self._weights_version, shape, place)))
            for place, one in enumerate(observations)
        ]

    def _run_plan(
        self, kept: _Kept, requests: Sequence[Request], entries: Sequence[torch.Tensor] | None, started: float
    ) -> _Pass:
        plan = kept.plan
        if entries is not None:
            for index, entry in enumerate(entries):
                plan.put_prefix(index, entry)
        if not self._may_replay(kept, requests):
            if entries is None:
                plan.prefix()
            self._synchronize()
            encoded = time.perf_counter()
            plan.denoise()
            return self._finish(plan, False, started, encoded)
        encoded = time.perf_counter()
        replay = kept.denoise if entries is not None else kept.whole
        assert replay is not None
        if kept.unchecked:
            plan.scrub(entries is None)
        replay()
        finished = self._finish(plan, True, started, encoded)
        if entries is None and kept.clocks:
            prefix_ms = kept.clocks[0].elapsed_time(kept.clocks[1])
            total = sum(finished.timings_ms.values())
            finished.timings_ms.update(prefix=prefix_ms, action_denoise=total - prefix_ms)
        return self._self_check(kept, finished, entries is None) if kept.unchecked else finished

    def _finish(self, plan: Plan, replayed: bool, started: float, encoded: float) -> _Pass:
        # Owned by the caller, member by member: the plan's buffer is overwritten by the next request.
        actions = plan.actions.to("cpu", copy=True).unbind()
        timings = {"prefix": (encoded - started) * 1e3, "action_denoise": (time.perf_counter() - encoded) * 1e3}
        return _Pass([one.clone() for one in actions], timings, replayed)

    def _may_replay(self, kept: _Kept, requests: Sequence[Request]) -> bool:
        wishes = {one.cuda_graph for one in requests}
        if self._capture is None or kept.failed or False in wishes:
            return False
        if kept.whole is None:
            if self.settings.cuda_graph is True or True in wishes:
                self._pending.pop(kept.plan.key, None)
                self._capture_plan(kept)
            else:
                self._pending[kept.plan.key] = None
        return kept.whole is not None

    @torch.inference_mode()
    def _capture_plan(self, kept: _Kept) -> None:
        assert self._capture is not None
        plan = kept.plan
        try:
            kept.clocks = _stage_clocks(self.device)
            plan.between_stages = partial(_record, kept.clocks[1:])
            whole = self._capture(partial(_timed, plan, kept.clocks[:1]))
            kept.denoise = self._capture(plan.denoise)
        except Exception as error:
            kept.failed, kept.denoise = True, None
            _LOG.warning("no graph of %s, it stays eager: %s: %s", plan.key, type(error).__name__, error)
            return
        kept.whole = whole
        _LOG.info("captured %s, %.1f MB of buffers, %s", plan.key, plan.buffer_bytes / 1e6, plan.attention())

    def _self_check(self, kept: _Kept, replayed: _Pass, with_prefix: bool) -> _Pass:
        """Compare one of the first replays with the same plan computed eagerly; the eager answer wins."""
        if with_prefix:
            kept.plan.prefix()
        kept.plan.denoise()
        eager = kept.plan.actions.to("cpu", copy=True).unbind()
        kept.unchecked -= 1
        if all(torch.equal(one, other) for one, other in zip(replayed.actions, eager, strict=True)):
            return replayed
        kept.failed, kept.whole, kept.denoise = True, None, None
        _LOG.warning("the graph of %s gives other actions than the eager run; it stays eager", kept.plan.key)
        return _Pass([one.clone() for one in eager], replayed.timings_ms, False)

    def _recover(self) -> None:
        """After an exception in the middle of a pass: what it may have left behind goes."""
        self._plans.clear()
        self._pending.clear()

    def _count_weight_changes(self) -> int:
        return sum(0 if one.is_inference() else one._version for one in self.model.parameters())

    def _notice_weight_changes(self) -> None:
        if self._cache.enabled and self._count_weight_changes() != self._weights_version:
            self.weights_changed()

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


@dataclass
class _Pass:
    """What one pass gave: ``actions`` [H, D] per member."""

    actions: list[torch.Tensor]
    timings_ms: dict[str, float]
    replayed: bool


def _fold(members: Sequence[ModelInputs]) -> tuple[list[ModelInputs], int]:
    """Distinct observations, and how many candidates are wanted of each."""
    distinct = list({id(one): one for one in members}.values())
    candidates = len(members) // len(distinct)
    repeated = [one for one in distinct for _ in range(candidates)]
    if len(repeated) == len(members) and all(one is other for one, other in zip(repeated, members, strict=True)):
        return distinct, candidates
    return list(members), 1


def _computed_cameras(observations: Sequence[ModelInputs]) -> list[int]:
    """Cameras that at least one observation has; the first one where none has any."""
    slots = range(len(observations[0].images))
    return [
        slot for slot in slots if any(slot < len(one.images) and one.image_masks[slot] for one in observations)
    ] or [0]


def _last_valid(mask: torch.Tensor) -> int:
    """Tokens up to the last valid one."""
    valid = mask.nonzero()
    return int(valid[-1]) + 1 if len(valid) else 0


def _stage_clocks(device: torch.device) -> list[Any]:
    """Events that keep their meaning inside a graph; none where torch cannot make them."""
    if device.type != "cuda":
        return []
    try:
        return [torch.cuda.Event(enable_timing=True, external=True) for _ in range(2)]
    except TypeError:
        return []


def _timed(plan: Plan, clocks: Sequence[Any]) -> None:
    _record(clocks)
    plan.whole()


def _record(clocks: Sequence[Any]) -> None:
    # Outside a capture (its warm-ups) such an event cannot be recorded.
    if clocks and torch.cuda.is_current_stream_capturing():
        for clock in clocks:
            clock.record()


def _compile_layers(model: Pi05) -> None:
    """Compile each kind of layer once; the layers of a kind share the code."""
    for layer in [*model.vision.vision_model.encoder.layers, *model.prefix.layers, *model.expert.layers]:
        layer.compile(dynamic=False)
