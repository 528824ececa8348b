"""Weights by the model streamer, where it is installed, and the switches that choose it."""

from __future__ import annotations

import logging

import pytest
import torch
from golden_data import HUB_STYLE_TINY

from pi05_ros.checkpoint import sources
from pi05_ros.checkpoint.formats import open_checkpoint
from pi05_ros.checkpoint.loader import load_model
from pi05_ros.errors import ConfigurationError

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_streamed_weights_are_the_mapped_ones(caplog: pytest.LogCaptureFixture):
    pytest.importorskip("runai_model_streamer", reason="runai-model-streamer is optional")
    checkpoint = open_checkpoint(HUB_STYLE_TINY)
    plain = load_model(checkpoint, dtype=torch.bfloat16, streamer=False).state_dict()
    progress: list[tuple[int, int]] = []
    with caplog.at_level(logging.INFO):
        model = load_model(
            checkpoint, dtype=torch.bfloat16, streamer=True, progress=lambda done, total: progress.append((done, total))
        )
    streamed = model.state_dict()
    assert list(streamed) == list(plain)
    assert all(torch.equal(streamed[name], plain[name]) and streamed[name].dtype == plain[name].dtype for name in plain)
    assert progress[-1][0] == progress[-1][1] and progress == sorted(progress)
    told = caplog.messages[-1]
    assert "streamed" in told and "GB/s" in told and "bfloat16 (as " in told and "float32 (as " in told


def test_switches(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sources, "find_spec", lambda name: object())
    monkeypatch.delenv(sources.STREAMER_VARIABLE, raising=False)
    assert sources.use_streamer(CUDA, None) and not sources.use_streamer(CPU, None)
    assert sources.use_streamer(CPU, True) and not sources.use_streamer(CUDA, False)
    monkeypatch.setenv(sources.STREAMER_VARIABLE, "false")
    assert not sources.use_streamer(CUDA, None)
    monkeypatch.setenv(sources.STREAMER_VARIABLE, "maybe")
    with pytest.raises(ConfigurationError, match="maybe"):
        sources.use_streamer(CUDA, None)


def test_not_installed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sources, "find_spec", lambda name: None)
    assert not sources.use_streamer(CUDA, None)
    with pytest.raises(ConfigurationError, match="pip install"):
        sources.use_streamer(CUDA, True)
