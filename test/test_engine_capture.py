"""What a CUDA graph will hold runs on pretended CUDA tensors without reading anything back; no GPU is needed."""

from __future__ import annotations

import pytest
import torch
from engine_cases import small_config
from fake_cuda import NoWaiting, fake_cuda

from pi05_ros.engine.modulation import ModulationTables
from pi05_ros.engine.placement import Placement, WeightPlacement
from pi05_ros.engine.plan import Plan, PlanKey
from pi05_ros.model.pi05 import Pi05
from pi05_ros.model.precision import parameter_dtype


def key(**changes: object) -> PlanKey:
    config = small_config()
    plain = PlanKey(2, 1, 3, 32, True, config.horizon, config.action_dim, 5, "off", torch.bfloat16)
    return plain._replace(**changes)


@pytest.mark.parametrize(
    "wanted",
    [
        key(),
        key(dtype=torch.float32),
        key(observations=1, masked=False),
        key(observations=1, candidates=3),
        key(rtc="guided"),
        key(rtc="hard_prefix"),
        key(observations=4, cameras=2, prompt=16, horizon=7, num_steps=10),
    ],
    ids=str,
)
def test_captured_functions_wait_for_nothing(wanted: PlanKey):
    with torch.device("meta"):
        model = Pi05(small_config())
    shapes = {name: one.shape for name, one in model.named_parameters()}
    cuda = torch.device("cuda", 0)
    with fake_cuda(), torch.inference_mode():
        weights = {
            name: torch.empty(shape, dtype=parameter_dtype(name, wanted.dtype), device=cuda)
            for name, shape in shapes.items()
        }
        model.load_state_dict(weights, assign=True)
        model.pack()
        placement = WeightPlacement(model, Placement(), model.device)
        plan = Plan(model, wanted, ModulationTables(model, placement), placement)
        with NoWaiting():
            plan.prefix()
            plan.denoise()
            plan.whole()
    members = wanted.observations * wanted.candidates
    assert plan.actions.shape == (members, wanted.horizon, wanted.action_dim)
    assert (plan.actions.device.type, plan.actions.dtype) == ("cuda", torch.float32)


def test_the_mode_refuses_what_a_graph_cannot_hold():
    """The checker itself."""
    with fake_cuda():
        values = torch.empty(4, device="cuda")
        for waiting in (lambda: values.cpu(), lambda: values.sum().item()):
            with pytest.raises(AssertionError), NoWaiting():
                waiting()
