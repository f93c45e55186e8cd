"""A case that plans and runs: layers are timed on two processes, all ways predicted, and ten of them run.

What is ranked is what the search of `plan` lays out, the function that users ask, where it may choose among
ways that two processes can take: so errors, rank correlation and regret are those of its answers. It is asked
for each kind of re-materialization alone, because with all the memory that there is it would recompute
nothing. The best five are run, and five others that lie evenly in the rest of the ranking, so that a plan
that is wrong about the slow ones is found out, too.

The plan is made from the probes before any of its candidates has taken a step, and is not touched again.
Then the candidates take turns, there and back in every round, and before and after each step stands the
reference step of the probes: a prediction is for a machine as fast as it was when the layers were timed, and
that can be told only by something else that was timed both times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

from gpipe_bench.experiments.beyond.side_by_side import Found, conditions_of, facts_of, void_of
from gpipe_bench.harness.experiment import Outcome, RunOptions
from gpipe_bench.harness.record import Metric, Scalar, from_samples
from gpipe_bench.harness.rounds import Usage, against_itself, slowest, turns
from gpipe_bench.pipeline.plan.links import FREE
from gpipe_bench.pipeline.plan.schedule import REMAT_MODES
from gpipe_bench.planner.candidate import Candidate, Prediction
from gpipe_bench.planner.costs import Costs
from gpipe_bench.planner.predict import Layout, predict
from gpipe_bench.planner.request import Request, Space

if TYPE_CHECKING:
    from gpipe_bench.planner.model import Subject
    from gpipe_bench.planner.probes import Bench


@dataclass(frozen=True)
class Planned:
    """A model at one size.

    Args:
        title: for tables
        model: of the zoo, or `module:function`
        options: of the zoo's model
        scale: in words
        optimizer: as `Request` has it
        batch_size: N
        numbers: M that the plan may choose, divisors of N
        rounds: of the probes
        turns: rounds in which the candidates are run
        chosen, others: how many are run
    """

    title: str
    model: str
    options: dict[str, Any]
    scale: str
    optimizer: str = "sgd"
    batch_size: int = 16
    numbers: tuple[int, ...] = (2, 4, 8)
    rounds: int = 12
    turns: int = 8
    chosen: int = 5
    others: int = 5

    @property
    def subject(self) -> Subject:
        """The model that the case's processes build."""
        from gpipe_bench.planner.model import Subject

        return Subject(self.model, None if ":" in self.model else self.options)


_OWN = "gpipe_bench.experiments.beyond.plan.own_model"
_SHORT = {
    "transformer": Planned(
        "Transformer", "transformer-lm",
        {"num_layers": 8, "vocab_size": 64, "d_model": 192, "ffn_dim": 768, "num_heads": 3, "seq_len": 32},
        "8 layers, width 192, 32 tokens",
    ),
    "gpt2": Planned(
        "GPT-2", "gpt2",
        {"num_layers": 6, "d_model": 192, "num_heads": 3, "vocab_size": 1000, "seq_len": 32, "tied": False},
        "6 blocks, width 192, 32 tokens",
    ),
    "amoebanet": Planned(
        "AmoebaNet-D", "amoebanet-d",
        {"num_layers": 6, "num_filters": 16, "image_size": 48, "num_classes": 10, "aux_head": False},
        "6 cells, 16 filters, 48 x 48 pixels",
    ),
    "own": Planned(
        "one's own", f"{_OWN}:mixer", {}, "a convolution, 10 mixing blocks of different widths, a head"
    ),
    # Chosen before anything of them was timed: nothing is tuned to them. With Adam, as most train.
    "llama": Planned(
        "Llama", "llama",
        {
            "num_layers": 6, "d_model": 192, "ffn_dim": 512, "num_heads": 6, "num_kv_heads": 2,
            "vocab_size": 1000, "seq_len": 32,
        },
        "6 blocks, width 192, 32 tokens, Adam", "adam",
    ),
    "attending": Planned(
        "torch's attention", f"{_OWN}:attending", {}, "9 blocks, width 192, 32 tokens, Adam", "adam"
    ),
}  # fmt: skip
_SMOKE = Planned(
    "Transformer",
    "transformer-lm",
    {"num_layers": 3, "vocab_size": 32, "d_model": 32, "ffn_dim": 64, "num_heads": 2, "seq_len": 16},
    "3 layers, width 32, 16 tokens",
    batch_size=4,
    numbers=(2, 4),
    rounds=2,
    turns=1,
    chosen=2,
    others=1,
)
MODELS: dict[str, dict[str, Planned]] = {
    "smoke": {"transformer": _SMOKE},
    "short": _SHORT,
    "full": {
        name: replace(each, rounds=2 * each.rounds, turns=3 * each.turns) for name, each in _SHORT.items()
    },
}


PART = "steps"
NUM_WORKERS = 2
SEED = 1811
MEMORY_BYTES = 2**40  # no cap: what is asked is time
CHOSEN, OTHERS = 5, 5
"""How many of a model are run: the best five of the plan, and five more from the rest of it."""
MOST_DRIFT = 2.0
"""A core that runs at less than half or more than double the speed of the probes makes a case void."""
STEP, BY_THE_CLOCK, PREDICTED = "step", "step by the clock", "predicted step"
WAYS = (
    ("gpipe", 1, "never"), ("gpipe", 1, "always"), ("gpipe", 1, "except_last"), ("1f1b", 1, "never"),
    ("1f1b", 1, "always"), ("zb-h1", 1, "never"), ("zb-h2", 1, "never"), ("interleaved", 2, "never"),
    ("interleaved", 2, "always"), ("breadth-first", 2, "never"), ("zb-v", 2, "never"), ("v-half", 2, "never"),
)  # fmt: skip
"""Schedule, stages per worker, re-materialization."""
REPLICATED = (("1f1b", "never"), ("1f1b", "always"))
"""The same of two replicas of the whole model, which is one stage each; in 1F1B they hold the least."""


def run(key: dict[str, Scalar], options: RunOptions) -> Outcome:
    from gpipe_bench.experiments.paper.timed.steps import run_processes

    planned = MODELS[options.profile][str(key["model"])]
    arguments = (planned, SEED + options.seed, options.device)
    return outcome(planned, run_processes(work, NUM_WORKERS, *arguments, device=options.device))


def work(planned: Planned, seed: int, device: str) -> Found:
    """Runs in each process: times the layers, plans, and only then runs what the plan has ranked."""
    import torch

    from gpipe_bench.pipeline.clock import conditions
    from gpipe_bench.planner.measured import measured, profiles_of
    from gpipe_bench.planner.probes import Bench, ProbeJob, probe
    from gpipe_bench.planner.timing import settle

    torch.manual_seed(seed)
    sizes = tuple(sorted(planned.batch_size // number for number in planned.numbers))
    bench = Bench(ProbeJob(planned.subject, sizes, planned.rounds, planned.optimizer, seed, device))
    start_s = perf_counter()
    everyone = bench.everyone(probe(bench))
    probes_s = perf_counter() - start_s
    costs = measured(everyone, "", profiles_of(planned.subject))
    start_s = perf_counter()
    asked = request_of(costs, planned)
    ranking = bench.everyone(ranked(costs, asked, planned.numbers) if bench.rank == 0 else None)[0]
    plan_s = perf_counter() - start_s
    chosen = with_replicas(to_run(ranking, planned.chosen, planned.others), ranking)
    runs = {title(each.candidate): _Run(bench, each) for _, each in chosen}
    for each in runs.values():
        for _ in range(2):
            each.step()
    settle()
    first = bench.reference()
    start = Usage.now()
    for name in turns(list(runs), planned.turns, seed):
        runs[name].take()
        bench.reference()
    used = Usage.now().since(start)
    for each in runs.values():
        each.pipeline.close()
    details = {
        "costs": replace(costs, profiles=None), "ranking": ranking,  # the same in all processes
        "places": [place for place, _ in chosen],  # of those that ran, in the ranking
        "speeds": {name: each.speeds() for name, each in runs.items()},
        "probes_s": probes_s, "plan_s": plan_s,
        "drift": median(bench.references[first:]) / bench.reference_s,  # in the rounds over the probes
    }  # fmt: skip
    times = {name: [seconds for _, seconds in each.taken] for name, each in runs.items()}
    return Found(times, used, conditions(), details)


class _Run:
    """A candidate over all processes."""

    def __init__(self, bench: Bench, prediction: Prediction) -> None:
        from gpipe_bench.planner.probes import Trained

        candidate = prediction.candidate
        schedule = candidate.rows()
        # torch divides parameters in place, and for good.
        layers = bench.fresh_layers() if candidate.fsdp > 1 else bench.layers
        self.pipeline, self._step = bench.pipeline(
            schedule, candidate.microbatch_size(prediction.batch_size), candidate.cut,
            over=processes_of(candidate, bench.device.type), layers=layers,
        )  # fmt: skip
        self.bench = bench
        self.trained = bench.trained if layers is bench.layers else Trained(layers, bench.job.optimizer)
        worker = bench.rank % candidate.num_workers
        self._mine = [layer for stage in schedule.stages_of(worker) for layer in candidate.cut[stage]]
        self.taken: list[tuple[int, float]] = []

    def step(self) -> float:
        """One step and the optimizer's, in seconds of this process."""
        from gpipe_bench.planner.timing import time_step

        seconds = time_step(self._step, self.trained.layers, device=self.bench.device)
        start_s = perf_counter()
        self.trained.update(self._mine, self.bench.device)
        return seconds + perf_counter() - start_s

    def take(self) -> None:
        """A step that counts, between two references."""
        self.taken.append((len(self.bench.references) - 1, self.step()))

    def speeds(self) -> list[float]:
        """How many times as long as in the probes the reference took around each step."""
        return [self.bench.speed(before, self.bench.reference_s) for before, _ in self.taken]


def processes_of(candidate: Candidate, device_type: str = "cpu") -> dict[str, Any]:
    """Arguments of `Pipeline` about processes: a pipeline over all of them, or a replica or a share in
    each; all must call.
    """
    from torch import distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from gpipe_bench.planner.probes import sharded_over

    if candidate.fsdp > 1:
        return sharded_over(candidate.fsdp, candidate.fsdp_level, device_type)
    if candidate.dp == 1:
        return {"group": dist.group.WORLD}
    sizes = (candidate.dp, candidate.num_workers)
    return {"mesh": init_device_mesh(device_type, sizes, mesh_dim_names=("dp", "pp"))}


def request_of(costs: Costs, planned: Planned) -> Request:
    """The request that the plan answered."""
    return Request(
        accelerators=NUM_WORKERS, memory_bytes=MEMORY_BYTES, batch_size=planned.batch_size,
        link=costs.link or FREE, optimizer=planned.optimizer,
    )  # fmt: skip


def ranked(costs: Costs, request: Request, numbers: Sequence[int]) -> list[Prediction]:
    """Predictions of all that the search lays out, the fastest first. The costs have profiles, because the
    search asks what fits.
    """
    alone = replace(costs, profiles=None)  # seconds are asked of a prediction, bytes of another case
    found = [predict(each, alone, request, parts=False) for each in searched(costs, request, numbers)]
    return sorted(found, key=lambda each: each.step_s)


def searched(costs: Costs, request: Request, numbers: Sequence[int]) -> list[Candidate]:
    """Candidates that the search of `plan` finds among `WAYS` and `REPLICATED` alone, each with
    its best cut: for as many accelerators as there are processes, with every number of micro-batches in
    `numbers`, of which replicas have their shares, for sizes that there are costs of. Equal ones once.
    """
    from gpipe_bench.planner.search import Search  # imports torch

    shares = tuple(sorted({number // NUM_WORKERS for number in numbers if number % NUM_WORKERS == 0}))
    found: dict[Any, Candidate] = {}  # by rows and cuts: with few micro-batches some schedules are the same
    for remat in REMAT_MODES:
        pipelines = tuple(name for name, _, what in WAYS if what == remat)
        replicas = tuple(name for name, what in REPLICATED if what == remat)
        for pp, schedules, counts in ((NUM_WORKERS, pipelines, tuple(numbers)), (1, replicas, shares)):
            if not schedules or not counts or (pp == 1 and not costs.parameter_bytes):
                continue  # of replicas nothing is known of what they would sum
            space = Space(schedules=schedules, microbatches=counts, pp=(pp,), remats=(remat,), fewer=False)
            for each in Search(costs, request, space).run(kept=None, of_each=lambda way: way):
                one = each.candidate
                rows = one.rows()
                found.setdefault((rows.actions, rows.placement, one.cut, one.dp, one.fsdp_level), one)
    return list(found.values())


def to_run(
    ranking: Sequence[Prediction], chosen: int = CHOSEN, others: int = OTHERS
) -> list[tuple[int, Prediction]]:
    """Candidates to run, with their places in the ranking from 0: the first ones, and others evenly from
    the rest, the last one among them.
    """
    places = list(range(min(chosen, len(ranking))))
    rest = range(len(places), len(ranking))
    if len(rest) > others:
        places += [rest[round((step + 1) * (len(rest) - 1) / others)] for step in range(others)]
    else:
        places += rest
    return [(place, ranking[place]) for place in places]


def with_replicas(
    chosen: Sequence[tuple[int, Prediction]], ranking: Sequence[Prediction]
) -> list[tuple[int, Prediction]]:
    """`chosen`, and the best candidate of replicas and of each level of shares that is missing in it."""
    kinds = {each.candidate.fsdp_level for _, each in chosen if each.candidate.replicas > 1}
    found = list(chosen)
    for place, each in enumerate(ranking):
        if each.candidate.replicas > 1 and each.candidate.fsdp_level not in kinds:
            kinds.add(each.candidate.fsdp_level)
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


def outcome(planned: Planned, found: Sequence[Found]) -> Outcome:
    """Numbers from what the processes of a case found."""
    first = found[0].details
    costs, ranking = first["costs"], first["ranking"]
    request, clock = request_of(costs, planned), slowest([each.times for each in found])
    metrics: list[Metric] = []
    steps: dict[str, list[float]] = {}
    for number in first["places"]:
        prediction = ranking[number]
        name = title(prediction.candidate)
        key: dict[str, Scalar] = {"configuration": name}
        speeds = [each.details["speeds"][name] for each in found]
        steps[name] = at_reference_s(prediction, costs, request, clock[name], speeds)
        metrics += [
            Metric(
                PREDICTED, 1e3 * prediction.step_s, "ms", "replayed", key=key, low=1e3 * prediction.low_s,
                high=1e3 * prediction.high_s,
                note="made before any step of it; 95 % of single steps",
            ),
            from_samples(
                STEP, [1e3 * each for each in steps[name]], "ms", key=key,
                note="at the speed that the machine had when the layers were timed",
            ),
            from_samples(BY_THE_CLOCK, [1e3 * each for each in clock[name]], "ms", key=key),
        ]  # fmt: skip
    ratios = [ratio for name in steps for ratio in against_itself(steps, name)]
    drifts = [each.details["drift"] for each in found]
    metrics += [
        *conditions_of(found, ratios, "first sample of a round / second, of all configurations"),
        *(
            Metric(
                "drift", drift, "ratio", "measured", key={"process": number},
                note="the reference step while the plan ran, over the same while the layers were timed",
            )
            for number, drift in enumerate(drifts)
        ),
    ]  # fmt: skip
    of_costs = {name: each for name, each in costs.to_data().items() if name != "jitter"}
    rows = [
        {"name": title(each.candidate), "cut": [len(stage) for stage in each.candidate.cut],
         "step_ms": 1e3 * each.step_s, "low_ms": 1e3 * each.low_s, "high_ms": 1e3 * each.high_s}
        for each in ranking
    ]  # fmt: skip
    details: dict[str, Any] = {
        "title": planned.title,
        "scale": planned.scale,
        "batch_size": planned.batch_size,
        "chosen": min(planned.chosen, len(steps)),
        "plan": {"ranking": rows, "places": first["places"]},
        "costs": of_costs | {name: first[name] for name in ("probes_s", "plan_s")},
        **facts_of(found),
        **void_of(metrics),
    }
    off = [drift for drift in drifts if not 1 / MOST_DRIFT <= drift <= MOST_DRIFT]
    if off:
        details["void"] = (
            f"a core's speed drifted by a factor of {off[0]:.2f} between the probes and the steps"
        )
    return Outcome(tuple(metrics), details)


def at_reference_s(
    prediction: Prediction,
    costs: Costs,
    request: Request,
    steps_s: Sequence[float],
    speeds: Sequence[Sequence[float]],
) -> list[float]:
    """The steps of the slowest process at the speed that the machine had when the layers were timed.

    A worker that was slower around a step, by its `speeds`, makes the replayed step longer by so much, and
    the step that ran is made shorter by as much.
    """
    layout = Layout(prediction.candidate, costs, request)
    plain_s = float(layout.timeline().makespan_s)
    return [
        step_s * plain_s / float(layout.timeline(around).makespan_s)
        for step_s, around in zip(steps_s, zip(*speeds, strict=True), strict=True)
    ]
