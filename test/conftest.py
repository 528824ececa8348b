"""Fixtures that more than one file needs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture
def threads_as_in_the_node() -> Iterator[None]:
    """As many torch threads as the processes of `ros_helpers` have: another number sums in another order."""
    import torch
    from ros_helpers import environment

    before = torch.get_num_threads()
    torch.set_num_threads(int(environment()["OMP_NUM_THREADS"]))
    yield
    torch.set_num_threads(before)
