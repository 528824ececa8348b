"""Packed projections: the same numbers from fewer matrices, and none of them twice in memory."""

from __future__ import annotations

import copy

import pytest
import torch
from golden_data import case, tiny_model

from pi05_ros.model.precision import cast_model


def test_packed_network_meets_the_golden_actions():
    one, model = case("b4"), copy.deepcopy(tiny_model())
    parameters = sum(parameter.numel() for parameter in model.parameters())
    model.pack()
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    assert not [name for name, _ in model.named_parameters() if ".q_proj." in name or ".gate_proj." in name]
    with torch.inference_mode():
        actions = model.sample_actions(
            one.images, one.image_masks, one.tokens, one.token_mask, one.noise, one.num_steps
        )
    assert (actions - one.tensors["actions"]).abs().max() <= 2e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packing_twice_changes_nothing(dtype: torch.dtype):
    model = cast_model(copy.deepcopy(tiny_model()), dtype)
    model.pack()
    before = {name: (parameter.data_ptr(), parameter.dtype) for name, parameter in model.named_parameters()}
    model.pack()
    assert {name: (parameter.data_ptr(), parameter.dtype) for name, parameter in model.named_parameters()} == before
