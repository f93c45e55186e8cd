"""A plan for a terminal: the best few, where each comes from, the winner's cut and schedule."""

from __future__ import annotations

from gpipe_bench.harness.report.grid import Grid as Table
from gpipe_bench.harness.report.grid import fill
from gpipe_bench.pipeline.plan.drawn.drawing import draw
from gpipe_bench.pipeline.plan.replay import SLOTS, replay
from gpipe_bench.pipeline.plan.schedules.known import named
from gpipe_bench.planner.answer import Plan
from gpipe_bench.planner.candidate import Candidate, Prediction

GIB = 2**30
MOST_WORKERS, MOST_MICROBATCHES = 16, 6
"""Of the schedule that is drawn: it repeats itself."""


def text(plan: Plan) -> str:
    """All of it, with the script and its command at the end."""
    parts = [_ways(plan), _cut(plan.best), _schedule(plan.best.candidate), _frontier(plan)]
    return "\n\n".join([*(part for part in parts if part), _how(plan)])


def seconds(value: float) -> str:
    """Three digits, in the unit that has them."""
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if value * factor >= 1:
            return f"{value * factor:.3g} {unit}"
    return f"{value * 1e6:.3g} us"


def title_of(candidate: Candidate) -> str:
    """A candidate in a few words."""
    twice = f" x {candidate.stages_per_worker}" if candidate.stages_per_worker > 1 else ""
    return f"{candidate.grid}, {candidate.schedule}{twice}"


def remat_of(candidate: Candidate) -> str:
    """How many stages recompute how much."""
    words = dict.fromkeys(candidate.remat)
    if len(words) == 1:
        return next(iter(words))
    return ", ".join(f"{candidate.remat.count(word)} {word}" for word in words)


def _ways(plan: Plan) -> str:
    request, best = plan.request, plan.best
    lines = [
        [
            title_of(each.candidate), each.candidate.num_microbatches, remat_of(each.candidate),
            seconds(each.step_s), f"{seconds(each.low_s)} .. {seconds(each.high_s)}",
            f"{each.examples_per_s:.3g}", f"{each.peak / GIB:.2f}",
            "-" if each is best else f"+{each.step_s / best.step_s - 1:.1%}",
        ]
        for each in plan.predictions
    ]  # fmt: skip
    hosts = f" on {request.hosts} hosts" if request.hosts > 1 else ""
    held_back = ""
    if request.held_back_bytes:
        held_back = f"\n{request.held_back_bytes / GIB:g} GiB of each held back for what is no tensor"
    title = (
        f"{plan.model.name}: {plan.model.num_parameters:,} parameters on {request.accelerators} x "
        f"{request.memory_bytes / GIB:g} GiB{hosts}{held_back}\n{request.precision}, {request.optimizer}, "
        f"mini-batch {request.batch_size}" + (", layers compiled" if request.compiled else "")
    )
    used = best.candidate.accelerators
    notes = [
        "",
        *([f"the first uses {used} of {request.accelerators} accelerators"] * (used < request.accelerators)),
        *(fill(f"{what}: {where}", rest="  ") for what, where in best.provenance.items()),
        fill(
            f"{plan.tried} ways laid out, {plan.skipped} left out: above those here lie their bounds, or, "
            "where there are too many cuts to try, 95 % of their step with even stages",
            rest="  ",
        ),
        *(
            ["a stage is recomputed as a whole"]
            if any(each != "never" for each in best.candidate.remat)
            else []
        ),
        *(
            [f"none with shards of parameters (fsdp), {why}"]
            if (why := plan.model.why_whole(compiled=request.compiled))
            else []
        ),
    ]
    columns = ["plan", "M", "recompute", "step", "range", "examples/s", "peak GiB", "slower"]
    return Table(title=title, columns=columns, lines=lines, notes=notes, right=frozenset({1, 5, 6, 7})).text()


def _cut(best: Prediction) -> str:
    candidate = best.candidate
    workers = named(
        candidate.schedule, candidate.num_workers, 1, stages_per_worker=candidate.stages_per_worker
    )
    lines = []
    for worker in range(candidate.num_workers):
        mine = workers.stages_of(worker)
        spans = [candidate.cut[stage] for stage in mine]
        lines.append(
            [
                worker, " ".join(map(str, mine)),
                " ".join(f"{span.start}-{span.stop - 1}" for span in spans),
                " ".join(candidate.remat[stage] for stage in mine),
                f"{best.peak_bytes[worker] / GIB:.2f}", best.peak_when[worker],
            ]
        )  # fmt: skip
    parts = ", ".join(
        f"{part} {share / best.step_s:.1%}"
        for part, share in best.parts_s.items()
        if share > 5e-4 * best.step_s
    )
    return Table(
        title=f"the first: {title_of(candidate)}",
        columns=["worker", "stages", "layers", "recompute", "peak GiB", "at"],
        lines=lines,
        notes=["", f"of the step: {parts}"] if parts else [],
        right=frozenset({4}),
    ).text()


def _schedule(candidate: Candidate) -> str:
    """Its first few micro-batches, in slots."""
    if not 1 < candidate.num_workers <= MOST_WORKERS:
        return ""
    count = min(candidate.num_microbatches, max(MOST_MICROBATCHES, candidate.num_workers))
    schedule = named(
        candidate.schedule, candidate.num_workers, count, remat=candidate.remat,
        stages_per_worker=candidate.stages_per_worker,
    )  # fmt: skip
    less = "" if count == candidate.num_microbatches else f", drawn with {count} micro-batches"
    return f"its schedule in slots{less}\n\n{draw(replay(schedule, SLOTS))}"


def _frontier(plan: Plan) -> str:
    if len(plan.frontier) < 2:
        return ""
    lines = [
        [
            f"{point.peak_bytes / GIB:.2f}", seconds(point.step_s), title_of(point.prediction.candidate),
            point.prediction.candidate.num_microbatches, remat_of(point.prediction.candidate),
        ]
        for point in plan.frontier
    ]  # fmt: skip
    return Table(
        title="with less memory", columns=["GiB", "step", "plan", "M", "recompute"], lines=lines,
        right=frozenset({0, 3}),
    ).text()  # fmt: skip


def _how(plan: Plan) -> str:
    return f"to run it (--script FILE writes the script):\n\n{plan.script()}\n{plan.command()}"
