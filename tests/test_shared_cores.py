"""Table 2's K = 4 for real: order, memory and loss of four processes, whatever cores they share."""

from __future__ import annotations

import pytest
from records import record

from gpipe_bench.experiments import table2
from gpipe_bench.experiments.table2 import SHARED_MICROBATCHES, SHARED_STAGES, Ran, run_on_shared_cores
from gpipe_bench.experiments.timed import steps
from gpipe_bench.experiments.timed.workloads import TABLE2
from gpipe_bench.pipeline.plan.schedule import gpipe

TINY = TABLE2["transformer"]["smoke"]


def of_schedule(stage):
    return tuple(
        (a.kind.name, a.microbatch) for a in gpipe(SHARED_STAGES, SHARED_MICROBATCHES).actions[stage]
    )


@pytest.mark.processes
def test_four_processes_take_the_schedules_actions_and_end_with_the_loss_of_one():
    outcome = run_on_shared_cores(TINY)
    made = record(
        experiment="table2", case={"model": "transformer", "batch": "on shared cores"},
        quantities=outcome.quantities, details=outcome.details,
    )  # fmt: skip
    assert made.quantity("loss", stages=4).value == made.quantity("loss", stages=1).value
    for stage in range(SHARED_STAGES):
        counted, modelled = (made.quantity("peak", stage=stage, how=how) for how in ("counted", "modelled"))
        assert (counted.provenance, modelled.provenance) == ("measured", "modelled")
        # The transport holds messages that the model leaves out, at most two in each direction.
        assert 1 <= counted.value / modelled.value < 1.25
    text = table2.shared_cores([made])
    assert "equal" in text
    assert text.count("\n") >= SHARED_STAGES + 2


def test_a_stage_that_took_its_actions_in_another_order_is_no_result(monkeypatch):
    swapped = list(of_schedule(1))
    swapped[0], swapped[1] = swapped[1], swapped[0]
    orders = [of_schedule(0), tuple(swapped), of_schedule(2), of_schedule(3)]
    found = [Ran(order, 1, 1.0) for order in orders]
    monkeypatch.setattr(steps, "run_processes", lambda *_: found)
    with pytest.raises(RuntimeError, match="stage 1 of transformer-lm took"):
        run_on_shared_cores(TINY)
