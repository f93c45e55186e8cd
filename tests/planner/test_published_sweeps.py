"""Ways of one cluster that others ran, in the order of our predictions; and that what ran fits."""

from __future__ import annotations

from statistics import mean

import pytest
from pandas import DataFrame

from gpipe_bench.experiments.beyond.plan import choices
from gpipe_bench.experiments.beyond.published_steps import sweeps
from gpipe_bench.planner import Request, Space, link_named, model_of, plan

ORDERS = {"GPT 181B on 384 A100": (0.5, 0.05), "GPT 1.3B on 8 V100, recomputed": (0.3, 0.08)}
"""By sweep: the least rank correlation, and the most regret."""


def test_every_way_of_a_sweep_says_what_it_was() -> None:
    for name, steps in sweeps().items():
        assert len(steps) >= 5, name
        assert {*ORDERS} <= {each for each, ways in sweeps().items() if len({way.tp for way in ways}) > 1}
        for step in steps:
            assert step.source
            assert step.differs
            assert step.pp * step.dp * step.fsdp * step.tp == step.accelerators
            assert step.batch_size % (step.dp * step.fsdp * step.num_microbatches) == 0
            assert bool(step.speed) != bool(step.step_s)


@pytest.mark.parametrize("name", ORDERS)
def test_ways_over_tensor_parallelism_come_in_the_order_that_others_measured(name: str) -> None:
    least, most = ORDERS[name]
    steps = sweeps()[name]
    order = choices(
        DataFrame(
            {
                "model": name,
                "predicted": [step.predicted()[0] / step.batch_size for step in steps],
                "measured": [step.measured_s / step.batch_size for step in steps],
            }
        )
    ).iloc[0]
    assert order["rank correlation"] >= least, order
    assert order.regret <= most, order


def test_cards_of_two_generations_are_as_far_apart_as_somebody_measured() -> None:
    steps = sweeps()["MPT on 8 A100 and 8 H100, 4096 tokens"]
    found = {
        device: mean(step.predicted()[0] / step.measured_s for step in steps if step.device == device)
        for device in ("a100", "h100")
    }
    assert found["h100"] / found["a100"] == pytest.approx(1, abs=0.1), found


@pytest.mark.parametrize(
    ("name", "device", "accelerators", "batch_size"),
    [("llama-8b", "h100-500w", 8, 16), ("llama-8b", "a100", 64, 64)],
)
def test_what_ran_fits_by_what_a_user_can_say(
    name: str, device: str, accelerators: int, batch_size: int
) -> None:
    """Rows of torchtitan on cards of 80 GB, of which 1.5 GiB are held back."""
    request = Request(
        accelerators=accelerators, memory_bytes=80 * 10**9, batch_size=batch_size, precision="bfloat16",
        link=link_named("nvlink", device), device_type=device, hosts=accelerators // 8,
        between=link_named("infiniband", device) if accelerators > 8 else None,
    )  # fmt: skip
    space = Space(pp=(1,), schedules=("1f1b",), microbatches=(1,), fewer=False)
    found = plan(model_of(name, batch_size), request, space=space, shown=1)
    assert found.best.peak <= request.usable_bytes
    assert found.best.candidate.fsdp > 1
