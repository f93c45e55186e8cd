"""The plan for two processes, and which of its candidates are run.

All schedules that two workers can take, every number of micro-batches that divides the mini-batch, with and
without re-materialization; each is cut by its own step. And two replicas of the whole model. The best five
are run, and five others that lie evenly in the rest of the ranking, so that a plan that is wrong about the
slow ones is found out, too. Only the standard library and `pipeline.plan` are imported.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

from gpipe_bench.experiments.plan.rules import CHOSEN, OTHERS
from gpipe_bench.experiments.planning.candidate import Candidate
from gpipe_bench.experiments.planning.costs.costs import Costs
from gpipe_bench.experiments.planning.predict import predict
from gpipe_bench.experiments.planning.prediction import Prediction
from gpipe_bench.experiments.planning.request import Request
from gpipe_bench.pipeline.plan.cutting.best import best_cut
from gpipe_bench.pipeline.plan.cutting.times import LayerTimes
from gpipe_bench.pipeline.plan.schedule import Kind
from gpipe_bench.pipeline.plan.schedules.known import named

NUM_WORKERS = 2
WAYS = (
    ("gpipe", 1, "never"), ("gpipe", 1, "always"), ("gpipe", 1, "except_last"), ("1f1b", 1, "never"),
    ("1f1b", 1, "always"), ("zb-h1", 1, "never"), ("zb-h2", 1, "never"), ("interleaved", 2, "never"),
    ("interleaved", 2, "always"), ("breadth-first", 2, "never"), ("zb-v", 2, "never"), ("v-half", 2, "never"),
)  # fmt: skip
"""Schedule, stages per worker, re-materialization."""
REPLICATED = (("1f1b", "never"), ("1f1b", "always"))
"""The same of two replicas of the whole model, which is one stage each; in 1F1B they hold the least."""


def candidates(costs: Costs, request: Request, numbers: Sequence[int]) -> list[Candidate]:
    """Every way with every number of micro-batches in `numbers` that there are costs of, equal ones once."""
    found = []
    known = set()  # rows and cuts: with few micro-batches some schedules are the same
    for number in numbers:
        size, rest = divmod(request.batch_size, number)
        if rest or size not in costs.sizes:
            continue
        for name, per_worker, remat in WAYS:
            if per_worker * NUM_WORKERS > costs.num_layers:
                continue
            try:
                schedule = named(name, NUM_WORKERS, number, stages_per_worker=per_worker)
            except ValueError:  # not with so few micro-batches
                continue
            split = any(action.kind is Kind.W for action in schedule)
            cut = best_cut(
                schedule,
                layer_times(costs, size, split=split),
                links=(request.link,) * (schedule.num_stages - 1),
                remats=(remat,),
            )
            same = None if cut is None else (schedule.actions, schedule.placement, cut.stages, remat)
            if cut is not None and same not in known:
                known.add(same)
                found.append(
                    Candidate(
                        cut=cut.stages, schedule=name, num_microbatches=number, num_workers=NUM_WORKERS,
                        stages_per_worker=per_worker, remat=(remat,) * schedule.num_stages,
                    )
                )  # fmt: skip
    if not costs.parameter_bytes:  # nothing is known of what replicas would sum
        return found
    return found + replicated(costs.num_layers, request.batch_size, numbers, frozenset(costs.sizes))


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


def layer_times(costs: Costs, size: int, *, split: bool) -> LayerTimes:
    """The costs of one size as a search for cuts takes them."""
    at = costs.at(size)
    return LayerTimes(
        forward_s=at.layers_s["G"],
        again_s=at.layers_s["R"],
        backward_s=at.layers_s["B"],
        inputs_s=at.layers_s["I"] if split else (),
        weights_s=at.layers_s["W"] if split else (),
        activation_bytes=at.activation_bytes,
        gradient_bytes=at.gradient_bytes,
        update_s=costs.update_s,
    )


def planned(costs: Costs, request: Request, numbers: Sequence[int]) -> list[Prediction]:
    """Predictions of all candidates, the fastest first."""
    found = [predict(each, costs, request, parts=False) for each in candidates(costs, request, numbers)]
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
    """Those, and the best one of replicas if none is among them."""
    best = next(((place, each) for place, each in enumerate(ranking) if each.candidate.replicas > 1), None)
    if best is None or any(each.candidate.replicas > 1 for _, each in chosen):
        return list(chosen)
    return sorted([*chosen, best], key=lambda one: one[0])


def title(candidate: Candidate) -> str:
    """`zb-v, M = 4, always`."""
    remat = sorted(set(candidate.remat))
    again = "" if remat == ["never"] else ", remat " + " / ".join(remat)
    grid = "" if candidate.dp == 1 else f"dp = {candidate.dp}, "
    return f"{grid}{candidate.schedule}, M = {candidate.num_microbatches}{again}"
