"""A policy whose flow is known in closed form, for rehearsing the closed loop without a network.

Its action chunks are distributed over a few targets (ways to do the task), each a whole chunk. For noise N(0, 1) at
flow time 1 and a mixture of points at 0, the flow is v(x, t) = (x - m(x, t)) / t with m the posterior mean of the
targets (Lipman et al. 2023, section 4, for a mixture of points). Which target a chunk takes follows from its noise, so
that chunks disagree, unless real-time chunking binds them to the last one.
"""

from __future__ import annotations

import numpy as np

from pi05_ros.engine.chunking import RealTimeChunking

_APPROACH_S = 0.3


def paths(at_s: np.ndarray, joints: int, ways: int, spread: float) -> np.ndarray:
    """float64 [ways, N, joints]: a slow motion and its variants, ``spread`` apart, at times [N] in seconds."""
    phase = np.linspace(0.0, 1.5, joints)
    base = 0.5 * np.sin(0.9 * at_s[:, None] + phase)
    offsets = spread * (np.arange(ways) - (ways - 1) / 2)
    return base + offsets[:, None, None] * np.cos(np.arange(joints) * np.pi)


def target_chunks(
    stamp_s: float, step_s: float, horizon: int, state: np.ndarray, ways: int = 2, spread: float = 0.3
) -> np.ndarray:
    """float64 [ways, horizon, joints]: from ``state`` (float [joints]) onto each path within about 0.3 s."""
    since = np.arange(horizon) * step_s
    wanted = paths(stamp_s + since, len(state), ways, spread)
    return wanted + (state - wanted[:, :1]) * np.exp(-since / _APPROACH_S)[:, None]


def denoise(targets: np.ndarray, noise: np.ndarray, steps: int, rtc: RealTimeChunking | None = None) -> np.ndarray:
    """Integrate the flow from ``noise`` [horizon, joints] to a chunk, bound to a leftover where ``rtc`` is given.

    The same Euler steps and correction as the engine's (numpy in float64; the engine's runs on a network's tensors).
    """
    horizon = len(noise)
    x = noise.astype(np.float64)
    times = [1.0 - k / steps for k in range(steps)]
    if rtc is not None and rtc.binds:
        rtc.check(horizon, noise.shape[1])
        previous = rtc.padded_leftover(horizon, noise.shape[1]).numpy().astype(np.float64)
        weights = rtc.row_weights(horizon).numpy()[:, None]
        pull = rtc.guidance(times).numpy()
    for step, time in enumerate(times):
        if rtc is not None and rtc.binds and rtc.mode == "hard_prefix":
            x = np.where(weights > 0, previous, x)
        distance = ((x - (1.0 - time) * targets) ** 2).sum(axis=(1, 2)) / (2.0 * time**2)
        likely = np.exp(distance.min() - distance)
        mean = np.tensordot(likely / likely.sum(), targets, axes=1)
        velocity = (x - mean) / time
        if rtc is not None and rtc.binds and rtc.mode == "guided":
            velocity = velocity - pull[step] * (previous - (x - time * velocity)) * weights
        x = x - velocity / steps
    if rtc is not None and rtc.binds and rtc.mode == "hard_prefix":
        x = np.where(weights > 0, previous, x)
    return x
