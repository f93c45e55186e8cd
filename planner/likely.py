"""Which ways are likely to be the best, told from rough costs before anything is searched."""

from __future__ import annotations

from gpipe_bench.pipeline.plan.partition import partition
from gpipe_bench.planner.candidate import Candidate
from gpipe_bench.planner.costs import About, Costs
from gpipe_bench.planner.measured import as_measured
from gpipe_bench.planner.predict import predict
from gpipe_bench.planner.request import Request

NEAR = 1.25
"""A way that takes at most so many times as long as the fastest may still be the fastest."""


def worth(request: Request, costs: Costs) -> set[About]:
    """What the fastest ways depend on, as far as can be said before anything is searched: every grid, in 1F1B
    and with a cut of even seconds, with all the memory that there could be.
    """
    request = as_measured(request, costs)
    found: list[tuple[float, set[About]]] = []
    for size, at in costs.sizes.items():
        weights = [ahead + back for ahead, back in zip(at.layers_s["G"], at.layers_s["B"], strict=True)]
        for pp in range(1, min(request.accelerators, costs.num_layers) + 1):
            replicas, rest = divmod(request.accelerators, pp)
            number, uneven = divmod(request.batch_size, replicas * size)
            if rest or uneven or not number:
                continue
            for level in (0, 2, 3) if replicas > 1 else (0,):
                if level and level not in at.shards_s:
                    continue
                candidate = Candidate(
                    cut=partition(weights, pp), schedule="1f1b", num_microbatches=number,
                    remat=("never",) * pp, num_workers=pp, dp=1 if level else replicas,
                    fsdp=replicas if level else 1, fsdp_level=level,
                )  # fmt: skip
                step_s = predict(candidate, costs, request, draws=0, parts=False).step_s
                needs = {About(size, level)} if replicas > 1 else set()
                if pp > 1 or replicas == 1:
                    needs.add(About(size, "layers"))
                found.append((step_s, needs))
    if not found:
        return {About(size, "layers") for size in costs.sizes}
    bound_s = NEAR * min(step_s for step_s, _ in found)
    return set().union(*(needs for step_s, needs in found if step_s <= bound_s))
