"""The closed loop without ROS: chunks in, one safe command per control period out.

Time comes in as arguments only: ``now_ns`` is the clock that stamps chunks, ``mono_s`` a monotonic clock for watchdogs.
Nothing here blocks. Not thread-safe; the owner holds one lock around every call.

    idle ──start──> waiting ──first chunk──> ramping ──> running <──> late
      ^                │ too far: idle           └───────┬───────────┘
      └────reset──── stopped <───── stop, fault (from any state)
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from pi05_ros.errors import ConfigurationError
from pi05_ros.playback.delay import DelayEstimate
from pi05_ros.playback.gate import ChunkGate, OfferedChunk, Reason
from pi05_ros.playback.handover import blend, ensemble
from pi05_ros.playback.limits import Limits
from pi05_ros.playback.plan import NS, Plan, TimedChunk
from pi05_ros.playback.settings import Command, Counts, PlayerSettings, State
from pi05_ros.profile import Output, Profile

MOVING: tuple[State, ...] = ("ramping", "running", "late")
_MAX_ENSEMBLE = 32
# A control loop that was held up does not make up for it in one step.
_MAX_CATCH_UP = 2.0
_MIN_TRAJECTORY_STEP_NS = 1_000_000
_MIN_REQUEST_S = 0.05


class Player:
    """One robot's chunks to commands.

    Args:
        profile: with an ``output`` section.
        limits: of commands; `Limits.of_profile`.

    Raises:
        ConfigurationError: ``config.no_output`` or ``config.observation_timeout``.
    """

    def __init__(self, profile: Profile, limits: Limits, settings: PlayerSettings) -> None:
        output = _output_of(profile)
        self.profile, self.limits, self.settings = profile, limits, settings
        self.names = limits.names
        self.period_s = 1.0 / output.rate_hz
        self.counts = Counts()
        self.delay = DelayEstimate()
        self.last_refusal: Reason | None = None
        self.revision = 0  # of the plan; whoever sends trajectories sends one at each change
        dims = profile.action.dims
        self.stepwise = np.array([dim.name in output.stepwise for dim in dims])
        self.velocity_mode = np.array([dim.control == "velocity" for dim in dims])
        self._start_distance = _start_distances(profile, output)
        # What a controller takes has a measured counterpart where the profile says so; grippers often have none.
        measured = {dim.name: index for index, dim in enumerate(profile.state.dims) if dim.field == "position"}
        self._state_index = np.array(
            [measured[dim.name] if np.isfinite(self._start_distance[index]) else -1 for index, dim in enumerate(dims)]
        )
        self._joints: dict[str, list[tuple[int, str]]] = {source: [] for source in profile.state.sources}
        for index in measured.values():
            dim = profile.state.dims[index]
            self._joints[profile.source_of(dim)].append((index, dim.joint_name))
        executed, rate = profile.timing.executed_steps, profile.timing.rate_hz
        if executed and rate and executed / rate >= settings.observation_timeout_s:
            raise ConfigurationError(
                "observation_timeout",
                f"observation_timeout_s: {settings.observation_timeout_s:g} s ends the motion before the "
                f"{executed} executed steps of profile {profile.name} are over ({executed / rate:.2f} s)",
            )
        self._gate = ChunkGate(profile, settings.observation_timeout_s)
        self._pose = np.full(len(profile.state.dims), np.nan)
        self._heard = np.full(len(profile.state.dims), np.nan)  # monotonic seconds
        self._prompt: tuple[str, int] | None = None
        self._policy_reason: Reason | None = None
        self._policy_heard: float | None = None
        self._clock: tuple[int, float] | None = None
        self._state: State = "idle"
        self._reason: Reason | None = None
        self._forget()

    def _forget(self) -> None:
        self._plan: Plan | None = None
        self._chunks: list[TimedChunk] = []
        self._newest_stamp_ns: int | None = None
        self._settled_ns = 0
        self._last = np.full(len(self.names), np.nan)
        self._last_mono: float | None = None
        self._commanded = False
        self._stopped_mono = 0.0
        self._requested: float | None = None
        self._asked = -np.inf

    @property
    def state(self) -> State:
        return self._state

    @property
    def reason(self) -> Reason | None:
        """Why the robot does not move as asked; ``None`` while it does."""
        return self._reason

    @property
    def prompt(self) -> str:
        return "" if self._prompt is None else self._prompt[0]

    def remaining_s(self, now_ns: int) -> float:
        """Seconds of planned motion that rest on a chunk; negative once late; 0 without a plan."""
        return 0.0 if self._plan is None else (self._plan.end_ns - now_ns) / NS

    def observation_age_s(self, now_ns: int) -> float:
        """Seconds since the observation that the motion rests on; -1 without one."""
        return -1.0 if not self._chunks else (now_ns - self._chunks[-1].stamp_ns) / NS

    def feedback_age_s(self, mono_s: float) -> float:
        """Seconds since the joint that has been silent for longest was heard of; -1 where one never was."""
        heard = [self._heard[index] for joints in self._joints.values() for index, _ in joints]
        return -1.0 if not heard or np.isnan(heard).any() else mono_s - min(heard)

    # What people say

    def start(self, mono_s: float) -> Reason | None:
        """Begin with the next fresh chunk; returns why not, or ``None``."""
        if self._state == "stopped":
            code, sentence = self._reason or ("stop", "")
            return "start.stopped", f"stopped ({code}: {sentence}); reset first"
        if self._state != "idle":
            return "start.running", f"the player is {self._state} already"
        silent = self._silent_source(mono_s)
        if silent is not None:
            return silent
        self._forget()
        self.counts = Counts(stops=self.counts.stops)
        self._clock = None
        self._enter("waiting", ("chunk.waiting", "the first chunk from now on starts the motion"))
        return None

    def stop(self, code: str, sentence: str, mono_s: float) -> None:
        """Hold what was commanded last and stay there until `reset`, from any state. The first reason is kept."""
        if self._state == "stopped":
            return
        moving = self._state in MOVING and self._commanded  # without a command nothing is known to be held
        self.counts.stops += 1
        self._enter("stopped", (code, sentence))
        self._stopped_mono = mono_s
        if moving and self._clock is not None:
            self._adopt(Plan.hold(np.where(self.velocity_mode, 0.0, self._last), self._clock[0], self.stepwise))
        else:
            self._plan = None
        self._chunks = []

    def reset(self) -> None:
        """A new episode: forget every chunk, give a stop free, and wait for `start`."""
        self._forget()
        self._enter("idle", None)

    # What topics say

    def feedback(self, source: str, positions: Mapping[str, float], mono_s: float) -> None:
        """Measured values of one state source by joint name; those of other joints are ignored."""
        for index, joint in self._joints[source]:
            value = positions.get(joint)
            if value is None:
                continue
            if not np.isfinite(value):
                if self._state in MOVING:
                    self.stop("feedback.nan", f"{source}: a finite position of {joint} expected, got {value}", mono_s)
                continue
            self._pose[index] = value
            self._heard[index] = mono_s

    def policy_says(
        self, state: str, reason: Reason | None, prompt: str, stamp_ns: int, now_ns: int, mono_s: float
    ) -> None:
        """The policy's status. Another prompt flushes what was planned; a dead or frozen input ends the motion."""
        self._policy_heard = mono_s
        if state != "active":
            reason = reason or ("policy.inactive", f"the policy node is {state}")
        self._policy_reason = reason
        if prompt and (self._prompt is None or stamp_ns > self._prompt[1]):
            self._change_prompt(prompt, stamp_ns, now_ns)
        ends = reason is not None and (state != "active" or reason[0] in ("input.dead", "input.frozen"))
        if ends and reason is not None and self._state in ("ramping", "running"):
            self._end_motion(now_ns, reason, mono_s)

    def offer(self, offered: OfferedChunk, now_ns: int, mono_s: float) -> Reason | None:
        """A chunk has come; returns why it is refused, or ``None``."""
        if self._state in ("idle", "stopped"):
            return "chunk.unwanted", f"the player is {self._state}"
        checked = self._gate.check(offered, now_ns)
        if isinstance(checked, TimedChunk):
            checked = self._out_of_turn(checked) or checked
        if not isinstance(checked, TimedChunk):
            self.counts.refused[checked[0]] += 1
            self.last_refusal = checked
            self._requested = None
            return checked
        if self._prompt is None or checked.prompt != self._prompt[0]:
            self._change_prompt(checked.prompt, checked.stamp_ns, now_ns)
        if self._requested is not None:
            self.delay.add(mono_s - self._requested)
            self._requested = None
        self._newest_stamp_ns = checked.stamp_ns
        self.counts.accepted += 1
        if self._state == "waiting":
            return self._begin(checked, now_ns)
        self._take_over(checked, now_ns)
        return None

    # The control period

    def tick(self, now_ns: int, mono_s: float) -> Command:
        """One control period: watchdogs, then the command."""
        self._watch_clock(now_ns, mono_s)
        if self._state in MOVING:
            silent = self._silent_source(mono_s)
            if silent is not None:
                self.stop(*silent, mono_s)
        elapsed = self.period_s if self._last_mono is None else mono_s - self._last_mono
        self._last_mono = mono_s
        plan = self._plan
        if plan is None or self._state in ("idle", "waiting"):
            return Command(self._last.copy(), False, self._state)
        if self._state in ("ramping", "running") and now_ns > plan.end_ns:
            self._run_out(now_ns, mono_s)
            plan = self._plan or plan
        elif self._state == "ramping" and now_ns >= self._settled_ns:
            self._enter("running", None)
        if self._state == "late":
            self.counts.late_s += elapsed
            self._explain_lateness(now_ns, mono_s)
        elapsed = min(max(elapsed, 0.0), _MAX_CATCH_UP * self.period_s)
        wanted = plan.sample(now_ns)
        values, clamped = self.limits.apply(self._last, wanted, elapsed)
        if self._state != "stopped" and clamped.any():
            self.counts.clamped += int(clamped.sum())
            self.counts.clamped_by_dim.update(name for name, hit in zip(self.names, clamped, strict=True) if hit)
        self._last, self._commanded = values, True
        held = self._state == "stopped" and mono_s - self._stopped_mono > self.settings.hold_s
        send = not (held and bool((values[self.velocity_mode] == 0.0).all()))
        self.counts.commands += send
        return Command(values.copy(), send, self._state)

    def request_due(self, now_ns: int, mono_s: float) -> bool:
        """Whether the next chunk is to be asked for now; True counts as asking."""
        if self._state not in ("waiting", *MOVING):
            return False
        if self._requested is not None and mono_s - self._requested < self.settings.request_timeout_s:
            return False
        if mono_s - self._asked < _MIN_REQUEST_S:
            return False
        delay_s = self.delay.seconds
        if self._state in ("ramping", "running") and self._plan is not None and self._chunks and delay_s is not None:
            needed_ns = min(self._chunks[-1].takeover_ns, self._plan.end_ns)
            if (needed_ns - now_ns) / NS > delay_s + self.settings.request_margin_s:
                return False
        self._requested = self._asked = mono_s
        self.counts.requests += 1
        return True

    def trajectory(self, now_ns: int) -> tuple[np.ndarray, np.ndarray]:
        """What will be commanded from the next period on if nothing else comes.

        Returns:
            int64 [N] times, strictly increasing and after ``now_ns``, and float64 [N, dims], within the limits.
        """
        plan = self._plan
        if plan is None:
            return np.empty(0, dtype=np.int64), np.empty((0, len(self.names)))
        first = now_ns + round(self.period_s * NS)
        knots = plan.times_ns[plan.times_ns > first]
        times = np.concatenate([[first], knots]).astype(np.int64)
        times = times[np.concatenate([[True], np.diff(times) >= _MIN_TRAJECTORY_STEP_NS])]
        rows, last, before = [], self._last, now_ns
        for at, wanted in zip(times, plan.sample(times), strict=True):
            last, _ = self.limits.apply(last, wanted, (int(at) - before) / NS)
            before = int(at)
            rows.append(last)
        return times, np.array(rows)

    # Within

    def _enter(self, state: State, reason: Reason | None) -> None:
        self._state, self._reason = state, reason

    def _adopt(self, plan: Plan) -> None:
        self._plan = plan
        self.revision += 1

    def _silent_source(self, mono_s: float) -> Reason | None:
        for source, joints in self._joints.items():
            for index, joint in joints:
                silent_s = mono_s - self._heard[index]
                where = f"{source} ({self.profile.state.sources[source].topic}): no position of {joint}"
                if np.isnan(silent_s):
                    return "feedback.missing", f"{where} yet"
                if silent_s > self.settings.feedback_timeout_s:
                    return "feedback.lost", f"{where} for {silent_s:.2f} s"
        return None

    def _watch_clock(self, now_ns: int, mono_s: float) -> None:
        before, self._clock = self._clock, (now_ns, mono_s)
        if before is None:
            return
        passed = (now_ns - before[0]) / NS
        drift = passed - (mono_s - before[1]) if self.settings.steady else min(passed, 0.0)
        if abs(drift) <= self.settings.clock_jump_s and passed >= -self.settings.clock_jump_s:
            return
        if self._state in MOVING:
            self.stop("clock.jump", f"the clock jumped by {drift:.3f} s; the chunks' stamps mean nothing now", mono_s)
        # Stamps of the old time order and date nothing any more.
        self._newest_stamp_ns = None
        self._prompt = None if self._prompt is None else (self._prompt[0], 0)

    def _change_prompt(self, prompt: str, since_ns: int, now_ns: int) -> None:
        before, self._prompt = self._prompt, (prompt, since_ns)
        if before is not None and self._state in ("ramping", "running"):
            current = self._chunks[-1].prompt if self._chunks else prompt
            if current != prompt:
                self._end_motion(now_ns, ("prompt.changed", f"waiting for the first chunk of {prompt!r}"), 0.0)

    def _out_of_turn(self, chunk: TimedChunk) -> Reason | None:
        if self._prompt is not None and chunk.prompt != self._prompt[0] and chunk.stamp_ns <= self._prompt[1]:
            return "chunk.prompt", f"a chunk of prompt {self._prompt[0]!r} expected, got one of {chunk.prompt!r}"
        if self._newest_stamp_ns is not None and chunk.stamp_ns <= self._newest_stamp_ns:
            return "chunk.older", "a newer observation has been answered already"
        return None

    def _begin(self, chunk: TimedChunk, now_ns: int) -> Reason | None:
        measured = np.where(self._state_index < 0, np.nan, self._pose[self._state_index])
        goal = Plan.of_chunk(chunk, self.stepwise)
        distance = np.abs(goal.sample(now_ns) - measured)
        far = np.flatnonzero(distance > self._start_distance)  # NaN compares False
        if far.size:
            where = ", ".join(
                f"{self.names[i]} {goal.sample(now_ns)[i]:.3f} (measured {measured[i]:.3f}, "
                f"at most {self._start_distance[i]:.3f} away)"
                for i in far
            )
            self._enter("idle", ("start.distance", f"the first action is too far from the robot: {where}"))
            return self._reason
        self._last = np.where(self.velocity_mode, 0.0, measured)
        origin = Plan.hold(np.where(np.isnan(self._last), goal.sample(now_ns), self._last), now_ns, self.stepwise)
        self._settled_ns = now_ns + round(self.settings.ramp_s * NS)
        self._chunks = [chunk]
        self._adopt(self._finished(blend(origin, goal, now_ns, self.settings.ramp_s)))
        self._enter("ramping", None)
        return None

    def _take_over(self, chunk: TimedChunk, now_ns: int) -> None:
        assert self._plan is not None
        settings, old = self.settings, self._plan
        new = Plan.of_chunk(chunk, self.stepwise)
        if self._state == "late":
            self._chunks = [chunk]
            self._settled_ns = now_ns + round(settings.resume_s * NS)
            self._adopt(self._finished(blend(old, new, now_ns, settings.resume_s)))
            self._enter("ramping", None)
            return
        self._chunks = [*(one for one in self._chunks if one.end_ns >= now_ns), chunk][-_MAX_ENSEMBLE:]
        left_s = (self._settled_ns - now_ns) / NS
        if self._state == "ramping" and left_s > 0.0:
            # The ramp goes on towards the new chunk, from where it has come to.
            plan = blend(old, new, now_ns, left_s)
        elif settings.handover in ("blend", "rtc"):
            window_s = settings.blend_s if settings.handover == "blend" else settings.rtc_blend_s
            plan = blend(old, new, now_ns, min(window_s, max((old.end_ns - now_ns) / NS, 0.0)))
        elif settings.handover == "ensemble":
            plan = ensemble(self._chunks, self.stepwise, now_ns, settings.ensemble_decay)
        else:
            plan = new
        self._adopt(self._finished(plan))

    def _finished(self, plan: Plan) -> Plan:
        """With the end that the observation's age sets, and the declared behaviour behind it."""
        end_ns = plan.end_ns
        if plan.chunk is not None:
            oldest = plan.chunk.stamp_ns if plan.chunk.oldest_input_ns is None else plan.chunk.oldest_input_ns
            end_ns = min(end_ns, oldest + round(self.settings.observation_timeout_s * NS))
        decelerate_s = self.settings.decelerate_s if self.settings.when_late == "decelerate" else 0.0
        return plan.with_tail(end_ns, self.velocity_mode, decelerate_s)

    def _end_motion(self, now_ns: int, reason: Reason, mono_s: float) -> None:
        """The declared behaviour now instead of at the end of the chunk."""
        assert self._plan is not None
        if self.settings.when_late == "stop" and reason[0] != "prompt.changed":
            self.stop(*reason, mono_s)
            return
        decelerate_s = self.settings.decelerate_s if self.settings.when_late == "decelerate" else 0.0
        self._adopt(self._plan.with_tail(now_ns, self.velocity_mode, decelerate_s))
        self._chunks = []
        self._enter("late", reason)

    def _run_out(self, now_ns: int, mono_s: float) -> None:
        self.counts.late += 1
        chunk = self._plan.chunk if self._plan is not None else None
        if chunk is not None and self._plan is not None and self._plan.end_ns < chunk.end_ns:
            reason = ("observation.old", "the motion rests on too old an observation, and no chunk has followed")
        else:
            reason = ("chunk.late", "the chunk is used up, and no other has followed")
        if self._policy_reason is not None:
            reason = (reason[0], f"{reason[1]}; the policy says {self._policy_reason[0]}: {self._policy_reason[1]}")
        if self.settings.when_late == "stop":
            self.stop(*reason, mono_s)
            return
        self._chunks = []
        self._enter("late", reason)

    def _explain_lateness(self, now_ns: int, mono_s: float) -> None:
        heard = self._policy_heard
        if heard is not None and mono_s - heard > self.settings.policy_timeout_s:
            self._reason = ("policy.silent", f"no status of the policy for {mono_s - heard:.1f} s: is it running?")
        elif self._policy_reason is not None and self._policy_reason[0].startswith(("input.", "policy.")):
            self._reason = self._policy_reason


def _output_of(profile: Profile) -> Output:
    if profile.output is None:
        raise ConfigurationError(
            "no_output",
            f"profile {profile.name}: an output section expected, which says what the robot's controllers take",
        )
    return profile.output


def _start_distances(profile: Profile, output: Output) -> np.ndarray:
    """float64 [dims], infinite where the first command is not compared with the measured pose."""
    given = output.start_distance
    taken = {name for controller in output.controllers.values() for name in controller.dims}
    distances = [
        given.get(dim.name, np.inf)
        if isinstance(given, dict)
        else given
        if dim.control == "position" and dim.name in taken
        else np.inf
        for dim in profile.action.dims
    ]
    return np.array(distances)
