"""What a step loses to the way its layers are cut, by partition rule, from the seconds of single layers."""

from __future__ import annotations

from collections.abc import Sequence

from gpipe_bench.pipeline.plan.breakdown import even_stages
from gpipe_bench.pipeline.plan.partition import RULES, partition
from gpipe_bench.pipeline.plan.replay import SLOTS, replay
from gpipe_bench.pipeline.plan.schedule import gpipe


def bound_shares(layers_s: Sequence[float], num_stages: int, num_microbatches: int) -> dict[str, float | str]:
    """By rule: the step of perfectly even stages over the step of the rule's stages (modelled), or why the
    rule gives none. Forward : recomputation : backward = 1 : 1 : 2, a free link.
    """
    schedule = gpipe(num_stages, num_microbatches, "always")
    shares: dict[str, float | str] = {}
    for rule in RULES:
        try:
            stages = partition(layers_s, num_stages, rule)
        except ValueError as error:
            shares[rule] = str(error).partition(":")[0]
            continue
        stages_s = [sum(layers_s[i] for i in span) for span in stages]
        work = {action: SLOTS[action.kind] * stages_s[action.stage] for action in schedule}
        even_s = replay(schedule, even_stages(work).__getitem__).makespan_s
        shares[rule] = even_s / replay(schedule, work.__getitem__).makespan_s
    return shares
