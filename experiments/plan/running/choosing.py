"""The plan for two processes, and which of its candidates are run.

What is ranked is what the search of `plan` lays out (`planning.searching`), the function that users ask,
where it may choose among ways that two processes can take: so errors, rank correlation and regret are those
of its answers. It is asked for each kind of re-materialization alone, because with all the memory that there
is it would recompute nothing. The best five are run, and five others that lie evenly in the rest of the
ranking, so that a plan that is wrong about the slow ones is found out, too.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import replace

from gpipe_bench.experiments.plan.rules import CHOSEN, OTHERS
from gpipe_bench.pipeline.plan.remat import REMAT_MODES
from gpipe_bench.planner.candidate import Candidate, Prediction
from gpipe_bench.planner.costs import Costs
from gpipe_bench.planner.predict import predict, schedule_of
from gpipe_bench.planner.request import Request
from gpipe_bench.planner.space import Space

NUM_WORKERS = 2
WAYS = (
    ("gpipe", 1, "never"), ("gpipe", 1, "always"), ("gpipe", 1, "except_last"), ("1f1b", 1, "never"),
    ("1f1b", 1, "always"), ("zb-h1", 1, "never"), ("zb-h2", 1, "never"), ("interleaved", 2, "never"),
    ("interleaved", 2, "always"), ("breadth-first", 2, "never"), ("zb-v", 2, "never"), ("v-half", 2, "never"),
)  # fmt: skip
"""Schedule, stages per worker, re-materialization."""
REPLICATED = (("1f1b", "never"), ("1f1b", "always"))
"""The same of two replicas of the whole model, which is one stage each; in 1F1B they hold the least."""


def searched(costs: Costs, request: Request, numbers: Sequence[int]) -> list[Candidate]:
    """What the search of `plan` lays out where it may choose among those ways alone, each with its best cut:
    of as many accelerators as there are processes, with every number of micro-batches in `numbers`, of which
    replicas have their shares, for sizes that there are costs of. Equal ones once.
    """
    from gpipe_bench.planner.search import Search  # imports torch

    found: list[Candidate] = []
    known = set()  # rows and cuts: with few micro-batches some schedules are the same
    for remat in REMAT_MODES:
        pipelines = tuple(name for name, _, what in WAYS if what == remat)
        replicas = tuple(name for name, what in REPLICATED if what == remat)
        shares = tuple(sorted({number // NUM_WORKERS for number in numbers if number % NUM_WORKERS == 0}))
        for pp, schedules, counts in ((NUM_WORKERS, pipelines, tuple(numbers)), (1, replicas, shares)):
            if not schedules or not counts or (pp == 1 and not costs.parameter_bytes):
                continue  # of replicas nothing is known of what they would sum
            space = Space(schedules=schedules, microbatches=counts, pp=(pp,), remats=(remat,), fewer=False)
            for each in Search(costs, request, space).run(kept=None, of_each=lambda way: way):
                candidate = each.candidate
                schedule = schedule_of(candidate)
                grid = (candidate.dp, candidate.fsdp_level)
                same = (schedule.actions, schedule.placement, candidate.cut, grid)
                if same not in known:
                    known.add(same)
                    found.append(candidate)
    return found


def replicated(
    num_layers: int, batch_size: int, numbers: Sequence[int], sizes: Container[int]
) -> list[Candidate]:
    """Two replicas of the whole model, whose micro-batches are as large as those of so many for one."""
    found = []
    for number in numbers:
        own, rest = divmod(number, NUM_WORKERS)
        if rest or batch_size % number or batch_size // number not in sizes:
            continue
        for name, remat in REPLICATED:
            found.append(
                Candidate(
                    cut=(range(num_layers),), schedule=name, num_microbatches=own, remat=(remat,),
                    num_workers=1, dp=NUM_WORKERS,
                )
            )  # fmt: skip
    return found


def planned(costs: Costs, request: Request, numbers: Sequence[int]) -> list[Prediction]:
    """Predictions of all that the search lays out, the fastest first. The costs have profiles, because the
    search asks what fits.
    """
    alone = replace(costs, profiles=None)  # seconds are asked of a prediction, bytes of another case
    found = [predict(each, alone, request, parts=False) for each in searched(costs, request, numbers)]
    return sorted(found, key=lambda each: each.step_s)


def to_run(
    ranking: Sequence[Prediction], chosen: int = CHOSEN, others: int = OTHERS
) -> list[tuple[int, Prediction]]:
    """Those that are run, with their places in the ranking from 0: the first ones, and others evenly from
    the rest, the last one among them.
    """
    best = range(min(chosen, len(ranking)))
    rest = range(len(best), len(ranking))
    places = list(best)
    if len(rest) <= others:
        places += rest
    else:
        places += [rest[round((step + 1) * (len(rest) - 1) / others)] for step in range(others)]
    return [(place, ranking[place]) for place in places]


def with_replicas(
    chosen: Sequence[tuple[int, Prediction]], ranking: Sequence[Prediction]
) -> list[tuple[int, Prediction]]:
    """Those, and the best one of replicas, and of each level of shares, where none is among them."""

    def kind(prediction: Prediction) -> int:
        return prediction.candidate.fsdp_level

    kinds = {kind(each) for _, each in chosen if each.candidate.replicas > 1}
    found = list(chosen)
    for place, each in enumerate(ranking):
        if each.candidate.replicas > 1 and kind(each) not in kinds:
            kinds.add(kind(each))
            found.append((place, each))
    return sorted(found, key=lambda one: one[0])


def title(candidate: Candidate) -> str:
    """`zb-v, M = 4, always`."""
    remat = sorted(set(candidate.remat))
    again = "" if remat == ["never"] else ", remat " + " / ".join(remat)
    grid = "" if candidate.dp == 1 else f"dp = {candidate.dp}, "
    if candidate.fsdp > 1:
        grid += f"fsdp = {candidate.fsdp} (ZeRO-{candidate.fsdp_level}), "
    return f"{grid}{candidate.schedule}, M = {candidate.num_microbatches}{again}"
