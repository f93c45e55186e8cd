"""The engine's own cost, measured side by side with the bare layers and with other engines.

Expected: stages overlap to within a few percent of the schedule's ideal step; two processes train a
Transformer at almost twice the speed of one; small micro-batches cost a fraction of a millisecond. The
machine should have nothing else to do:

    python -m experiments run engine
    python -m experiments run engine --device cuda    the same on GPUs, a process for each

The variants of a case take turns in the same processes, one thread each, every process on a core of its own
(`side_by_side.py`). Before and after, the real layers are counted: that all micro-batches ran, that stages
were recomputed, that gradients agree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from gpipe_bench.experiments.side_by_side import (
    Found,
    Sign,
    lacks_gpus,
    measured,
    side_by_side,
    state_of,
    steps_of,
    verdict,
    void_by,
)
from gpipe_bench.harness.experiment import Case, Experiment, Outcome, RunOptions
from gpipe_bench.harness.record import Quantity, Record, Scalar, from_samples
from gpipe_bench.harness.report.grid import Grid
from gpipe_bench.harness.rounds import Times, differences, ratios
from gpipe_bench.harness.units import show

if TYPE_CHECKING:
    from gpipe_bench.experiments.engine_turns import Job

# Rounds by part and profile.
ROUNDS: dict[str, dict[str, int]] = {
    "smoke": {"overlap": 1, "transformer": 1, "small": 2, "in process": 2},
    "short": {"overlap": 4, "transformer": 8, "small": 16, "in process": 16},
    "full": {"overlap": 10, "transformer": 40, "small": 60, "in process": 60},
}
START_S = 5.0  # until all processes are up
WAIT_S = 0.02  # of a waiting stage, per action
TRANSFORMER: dict[str, Any] = {
    "num_layers": 8, "vocab_size": 64, "d_model": 256, "ffn_dim": 1024, "num_heads": 4, "seq_len": 64,
}  # fmt: skip
LARGE: dict[str, Any] = {
    "num_layers": 8, "vocab_size": 32_000, "d_model": 2048, "ffn_dim": 8192, "num_heads": 32, "seq_len": 512,
}  # fmt: skip
"""The same on GPUs, which the small one would keep waiting."""


def cases(options: RunOptions) -> list[Case]:
    def case(
        part: str, num_stages: int, num_microbatches: int, remat: str, estimate_s: float, **more: str
    ) -> Case:
        key: dict[str, Scalar] = {
            "part": part, "num_stages": num_stages, "num_microbatches": num_microbatches, "remat": remat,
            **more,
        }  # fmt: skip
        return Case(key, START_S + estimate_s * ROUNDS[options.profile][part])

    if options.device == "cuda":
        return _on_gpus(case)
    if options.profile == "smoke":
        return [
            case("overlap", 4, 8, "never", 2.5),
            case("transformer", 2, 4, "never", 2.5),
            case("transformer", 2, 4, "except_last", 1.0),
            case("small", 2, 64, "never", 0.5, transport="gloo"),
            case("in process", 4, 8, "never", 0.3, against="bare layers"),
        ]
    return [
        *(
            case("overlap", k, m, remat, 0.15 * (m + k))
            for k, m, remat in ((8, 32, "never"), (4, 8, "never"), (4, 8, "except_last"))
        ),
        case("transformer", 2, 16, "never", 8.0),
        *(case("transformer", 2, m, "except_last", 0.2 + 0.2 * m) for m in (1, 4, 16)),
        *(case("small", 2, 64, "never", 0.5, transport=name) for name in ("gloo", "memory")),
        *(
            case("in process", 4, 8, remat, 0.4, against=peer)
            for peer in ("bare layers", "torchgpipe")
            for remat in ("never", "except_last")
        ),
    ]


def _on_gpus(case: Callable[..., Case]) -> list[Case]:
    """The cases that a GPU makes others; what waits instead of computing is the host's everywhere."""
    return [
        *(case("in process", 4, 8, remat, 0.4, against=peer, device="cuda")
          for peer in ("bare layers", "torchgpipe") for remat in ("never", "except_last")),
        *(case("transformer", 2, m, "always", 0.5, device="cuda") for m in (1, 4, 16)),
        case("transformer", 2, 16, "never", 0.5, device="cuda"),
        case("small", 2, 64, "never", 0.5, transport="NCCL", device="cuda"),
    ]  # fmt: skip


def run(case: Case, options: RunOptions) -> Outcome:
    from gpipe_bench.experiments.engine_turns import work
    from gpipe_bench.experiments.engines.known import why_no_torchgpipe
    from gpipe_bench.experiments.timed.steps import run_processes

    part = str(case.key["part"])
    job = job_of(**case.key)  # type: ignore[arg-type]
    missing = why_no_torchgpipe() if case.key.get("against") == "torchgpipe" else ""
    if reason := missing or lacks_gpus(job.device, job.num_processes):
        return Outcome(status="skipped", reason=reason)
    # Without GPUs of their own the processes measure the host's side, and there may be more of them.
    return side_by_side(
        partial(run_processes, work, job.num_processes, job, device=job.device), partial(numbers, part, job),
        ROUNDS[options.profile][part], again=options.profile != "smoke",
    )  # fmt: skip


def job_of(
    part: str,
    num_stages: int,
    num_microbatches: int,
    remat: str,
    against: str = "",
    transport: str = "memory",  # shared by neighbours, or "gloo"; GPUs have "NCCL"
    device: str = "cpu",
) -> Job:
    """What the processes of a case do."""
    from gpipe_bench.experiments.engine_turns import BARE, PLAIN, PLAIN_ALONE, Job

    over_network = "gpipe_bench.experiments.engines.known:OverNetwork"
    ours = {"ours": (over_network if transport == "gloo" else "ours", remat)}
    bare, torchs = {"bare layers": (BARE, "never")}, {"ScheduleGPipe": ("torch-gpipe", remat)}
    make = partial(Job, num_stages=num_stages, num_microbatches=num_microbatches, device=device)
    match part:
        case "overlap":
            return make("waiting", {"num_layers": num_stages, "wait_s": WAIT_S}, 1, engines=ours | bare)
        case "small":
            return make("linear", {"num_layers": num_stages}, 1, engines=ours | torchs | bare)
        case "in process":
            engines = ours | {"bare layers": (BARE, remat)}
            if against == "torchgpipe":
                engines["torchgpipe"] = ("torchgpipe", remat)
            return make("linear", {"num_layers": 2 * num_stages}, 1, engines=engines, in_process=True)
    plain = {"sequential": (PLAIN_ALONE, "never"), "sequential on every core": (PLAIN, "never")}
    engines = ours | torchs | (plain if remat == "never" else {})
    return make("transformer-lm", TRANSFORMER if device == "cpu" else LARGE, 2, engines=engines)


# What the processes found, as numbers


def numbers(part: str, job: Job, times: Times, found: Sequence[Found]) -> Outcome:
    """What the processes of a case found."""
    from gpipe_bench.experiments.engine_turns import details_of

    by_part = {
        "overlap": _overlap, "transformer": _transformer, "small": _small, "in process": _in_process,
    }  # fmt: skip
    return Outcome((*steps_of(times), *by_part[part](job, times)), details_of(job, found))


def _overlap(job: Job, times: Times) -> list[Quantity]:
    """Against the schedule with the nominal wait in every action, each step on its own; and, round by round,
    with the time that the bare stages take for an action, which includes what waking up costs here.
    """
    from gpipe_bench.pipeline.plan.named import gpipe
    from gpipe_bench.pipeline.plan.schedule import Kind
    from gpipe_bench.pipeline.plan.simulate import replay

    schedule = gpipe(job.num_stages, job.num_microbatches, job.engines["ours"][1])
    num_slots = replay(schedule, dict.fromkeys((Kind.F, Kind.R, Kind.B), 1)).makespan_s
    bare_actions = 2 * job.num_microbatches  # F and B
    of_ideal = [num_slots * WAIT_S / step_s for step_s in times["ours"]]
    of_bare = ratios(times, "bare layers", "ours", num_slots / bare_actions)
    bare_ms = [1e3 * s / bare_actions for s in times["bare layers"]]
    return [
        from_samples("share of the ideal", of_ideal, "ratio"),
        from_samples("share of the bare ideal", of_bare, "ratio"),
        Quantity("ideal step", 1e3 * num_slots * WAIT_S, "ms", "replayed"),
        from_samples("bare action", bare_ms, "ms"),
    ]


def _transformer(job: Job, times: Times) -> list[Quantity]:
    found = [_rate("ScheduleGPipe", times)]
    if "sequential" in times:
        num_stages, count = job.num_stages, job.num_microbatches
        ideal = (count + num_stages - 1) / (count * num_stages)  # of the sequential step
        for name, variant in (("efficiency", "ours"), ("efficiency of ScheduleGPipe", "ScheduleGPipe")):
            reached = ratios(times, "sequential", variant, ideal)
            found.append(from_samples(name, reached, "ratio"))
        found.append(
            from_samples(
                "core beside a busy one", ratios(times, "sequential", "sequential on every core"), "ratio",
                note="speed of one core while all compute, against alone",
            )
        )  # fmt: skip
    return found


def _small(job: Job, times: Times) -> list[Quantity]:
    note = "engine and transport per micro-batch, forward and backward"
    return [
        *(
            _cost(name, variant, times, job.num_microbatches, note)
            for name, variant in (
                ("per micro-batch", "ours"),
                ("per micro-batch of ScheduleGPipe", "ScheduleGPipe"),
            )
        ),
        _rate("ScheduleGPipe", times),
    ]


def _in_process(job: Job, times: Times) -> list[Quantity]:
    from gpipe_bench.pipeline.plan.named import gpipe

    num_actions = sum(1 for _ in gpipe(job.num_stages, job.num_microbatches, job.engines["ours"][1]))
    note = "over the bare layers' own time"
    found = [_rate("torchgpipe", times)] if "torchgpipe" in times else []
    for name, variant in (("per action", "ours"), ("per action of torchgpipe", "torchgpipe")):
        if variant in times:
            found.append(_cost(name, variant, times, num_actions, note))
    return found


def _rate(other: str, times: Times) -> Quantity:
    """Our steps per second over another engine's."""
    return from_samples(f"rate against {other}", ratios(times, other, "ours"), "ratio")


def _cost(name: str, variant: str, times: Times, number: int, note: str) -> Quantity:
    """What a step takes longer than the bare layers, for each of `number` things in it."""
    cost_us = differences(times, variant, "bare layers", 1e6 / number)
    return from_samples(name, cost_us, "us", note=note)


# The targets and what was measured: one line each, missed ones too


class Target(NamedTuple):
    """What a quantity of a case should be: at least or at most `bound`, in the quantity's unit."""

    what: str
    case: dict[str, Scalar]
    quantity: str
    sign: Sign
    bound: float


def _targets() -> list[Target]:
    found = []
    for what, name in (("share of the ideal step", "ideal"), ("... of the bare stages' ideal", "bare ideal")):
        for k, m, bound in ((8, 32, 0.97), (4, 8, 0.95)):
            key: dict[str, Scalar] = {"part": "overlap", "remat": "never", "num_stages": k}
            words = f"waiting stages, K={k}, M={m}: {what}"
            found.append(Target(words, key, f"share of the {name}", ">=", bound))
    rate = "rate against ScheduleGPipe"
    key = {"part": "transformer", "num_microbatches": 16, "remat": "never"}
    words = "Transformer, K=2, M=16: "
    found.append(Target(f"{words}speed-up / (M K / (M + K - 1))", key, "efficiency", ">=", 0.88))
    found.append(Target(f"{words}step rate / ScheduleGPipe", key, rate, ">=", 1.0))
    for m, bound in ((1, 1.3), (4, 1.12), (16, 1.04)):
        key = {"part": "transformer", "num_microbatches": m, "remat": "except_last"}
        words = f"Transformer, K=2, re-materialized: step rate / ScheduleGPipe + checkpoint, M={m}"
        found.append(Target(words, key, rate, ">=", bound))
    for transport, how in (("gloo", "gloo"), ("memory", "shared memory")):
        key, words = {"part": "small", "transport": transport}, "micro-batches of no work, K=2, M=64, "
        found.append(Target(f"{words}{how}: engine and transport", key, "per micro-batch", "<=", 200.0))
        found.append(Target(f"{words}{how}: step rate / ScheduleGPipe", key, rate, ">=", 2.0))
    in_process: tuple[tuple[str, str, str, Sign, float], ...] = (
        ("bare layers", "engine per action", "per action", "<=", 60.0),
        ("torchgpipe", "step rate / torchgpipe", "rate against torchgpipe", ">=", 1.0),
    )
    for against, what, name, sign, bound in in_process:
        for remat, how in (("never", ""), ("except_last", ", re-materialized")):
            key = {"part": "in process", "against": against, "remat": remat}
            found.append(Target(f"in one process{how}: {what}", key, name, sign, bound))
    return found


TARGETS = _targets()


def tables(records: Sequence[Record]) -> str:
    """The targets, which are for processors, then everything else that was measured."""
    if records and all(record.case.get("device") == "cuda" for record in records):
        return _everything(records)
    table = Grid(
        title="The engine's own cost, side by side (measured)",
        columns=["", "target", "median [95 % interval]", "holds?"],
        lines=[_line(target, records) for target in TARGETS],
    ).text()
    if "void: " in table or "contaminated: " in table:
        table += (
            "\n\nvoid: our first sample of a round and the second, of the same code, differ by more than\n"
            "chance. The machine changed while it measured, so nothing is judged; measure again.\n"
            "contaminated: so it was twice, the second time with more rounds."
        )
    return f"{table}\n\n{_everything(records)}"


def _everything(records: Sequence[Record]) -> str:
    lines = [
        [record.label if number == 0 else "", quantity.label, measured(quantity)]
        for record in records
        for number, quantity in enumerate(record.quantities)
    ]
    skipped = [record for record in records if "device" in record.case and not record.quantities]
    lines += [[record.label, record.status, record.reason] for record in skipped]
    return Grid(columns=["case", "quantity", "median [95 % interval]"], lines=lines).text()


def _line(target: Target, records: Sequence[Record]) -> list[str]:
    of_target = (each for each in records if target.case.items() <= each.case.items())
    record = next((each for each in of_target if "device" not in each.case), None)
    if record is None:
        return [target.what, f"{target.sign} {target.bound:g}", "-", "not run"]
    quantity = record.quantity(target.quantity)
    if quantity is None:
        why = f"{record.status}: {record.reason or 'without this number'}"
        return [target.what, f"{target.sign} {target.bound:g}", "-", why]
    bound = f"{target.sign} {show(target.bound, quantity.unit, 3)}"
    word, control = state_of(record)[0], record.quantity("control")
    said = f"{word}: {void_by(control)}" if word else verdict(quantity, target.sign, target.bound, control)
    return [target.what, bound, measured(quantity), said]


EXPERIMENT = Experiment(
    name="engine",
    title="The engine's own cost, measured side by side",
    source="beyond the paper",
    describe=(
        "Overlap of waiting stages, speed-up of a Transformer on two processes, cost of small micro-batches "
        "and of actions in one process, in turns with torch.distributed.pipelining, torchgpipe and the bare "
        "layers."
    ),
    profiles={
        "smoke": "a round or two of five cases",
        "short": "enough rounds for intervals of a few percent",
        "full": "three to four times as many rounds",
    },
    cases=cases,
    run=run,
    cells=lambda records: [],  # the paper measured no engine but its own
    tables=tables,
)
