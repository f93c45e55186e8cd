"""What needs no other process: sums of gradients that are under way."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from gpipe_bench.pipeline.mesh.sharding import PartHolders, Scatter, Shards
from gpipe_bench.pipeline.stage.stage import Stage


class FakeHolders:
    """Two holders of equal gradients, whose sum is there when somebody waits for it."""

    def __init__(self) -> None:
        self.waited = 0

    def scatter(self, mine: Tensor, whole: Tensor, op: Any) -> Any:
        return mine, whole

    def wait(self, work: tuple[Tensor, Tensor]) -> None:
        mine, whole = work
        mine.copy_(2 * whole[: len(mine)])
        self.waited += 1


class FakeLayer:
    def __init__(self, sums: Scatter) -> None:
        self.sums = sums


def test_a_sum_under_way_is_waited_for() -> None:
    """Not before the step is over; one that is added to an earlier one at once."""
    for later in (True, False):
        holders = FakeHolders()
        sums = Scatter(cast(PartHolders, holders))
        sums.later = later
        shards = Shards(
            Stage(0, [], 0, device=torch.device("cpu"), is_last=True), 2, cast(PartHolders, holders)
        )
        shards._layers = cast(Any, [FakeLayer(sums)])
        mine, whole = torch.zeros(2), torch.arange(4.0)
        sums(mine, whole, cast(Any, None), None)
        assert holders.waited == (0 if later else 1)
        shards.finish()
        assert holders.waited == 1
        assert torch.equal(mine, torch.tensor([0.0, 2.0]))
        shards.finish()
        assert holders.waited == 1
