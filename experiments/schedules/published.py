"""What others published of schedules, replayed: rows of data, and one function that answers each of them.

Qi et al., Zero Bubble Pipeline Parallelism (arXiv 2401.10241), print the seconds of a forward, of both halves
of a backward and of a message for each of their models on A100s, and the share of a worker's time that each
schedule then leaves idle: (cost - m (F + B + W)) / cost. Their cost is the longest span of a worker, from its
first action to its last, and not the makespan: a schedule may keep its skew from step to step. Only ZB-H2 and
ZB-V differ in that. Nothing is unknown, so the replay must come to the same rates; what was found by a search
(ZB-1p, ZB-2p, ZB-V) another search may miss or beat.

Of OLMo-core, torchtitan and Primus bubbles and counts of what is alive follow from the schedule alone. Their
ratios of speeds hang on what is not stated with them: the number of micro-batches and of stages per worker,
and on kernels and messages that equal costs leave out. So those are ranges over the former, and the latter is
what a verdict finds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median_high

from gpipe_bench.experiments.computed import answers, computed, outcome, over
from gpipe_bench.experiments.schedules import beyond
from gpipe_bench.experiments.schedules.beyond import FORMULAS, Row
from gpipe_bench.experiments.schedules.laid_out import alive_by_worker, in_slots, span
from gpipe_bench.harness.experiment import Case, Outcome
from gpipe_bench.harness.record import Record, Scalar, of_case
from gpipe_bench.harness.verdict import Answer
from gpipe_bench.pipeline.plan.generate import generate
from gpipe_bench.pipeline.plan.links import Link
from gpipe_bench.pipeline.plan.list_scheduler import Policy, StuckError, Work, rows
from gpipe_bench.pipeline.plan.named import named
from gpipe_bench.pipeline.plan.schedule import Kind, Schedule
from gpipe_bench.pipeline.plan.simulate import replay
from gpipe_bench.pipeline.plan.timeline import Timeline
from gpipe_bench.pipeline.plan.vee import vee

PART = "published"
RATES, RATES_V, SPEEDS, ELSEWHERE = "zero-bubble", "zero-bubble-v", "zero-bubble-speed", "schedules-elsewhere"
SECONDS = {"1.5B": 2.0, "6.2B": 2.0, "14.6B": 7.0, "28.3B": 20.0}
"""By model of Table 5: how long its case takes."""
PAPER_TABLES = (RATES, RATES_V, SPEEDS, FORMULAS, ELSEWHERE)

WHOLE = "theirs is the memory of a GPU, parameters and optimizer included; ours the activations' alone"
OPEN = "micro-batches, stages per worker, chunks or engines, where they are not stated"
SEQUENCE = 1024  # tokens


@dataclass(frozen=True, slots=True)
class Setting:
    """One of their settings; times in milliseconds of one micro-batch on one worker."""

    model: str
    num_workers: int
    num_microbatches: int
    forward_ms: float
    input_backward_ms: float
    weight_backward_ms: float
    message_ms: float
    num_layers: int
    hidden_size: int
    num_heads: int

    @property
    def column(self) -> str:
        """As in results/paper.csv."""
        return f"{self.model}, p={self.num_workers}, m={self.num_microbatches}"

    @property
    def link(self) -> Link:
        return Link("their messages", self.message_ms)

    @property
    def waiting_share(self) -> float:
        """What a micro-batch holds from the first half of its backward to the second, of what it holds
        before: their 32 h of 34 h + 5 a s.
        """
        return 32 * self.hidden_size / (34 * self.hidden_size + 5 * self.num_heads * SEQUENCE)

    def times_ms(self, parts: float = 1.0) -> dict[Kind, float]:
        """Of an action where a worker's layers are cut into `parts` stages."""
        return {
            Kind.F: self.forward_ms / parts,
            Kind.B: (self.input_backward_ms + self.weight_backward_ms) / parts,
            Kind.I: self.input_backward_ms / parts,
            Kind.W: self.weight_backward_ms / parts,
        }

    def rate(self, cost_ms: float) -> float:
        """Idle share of a worker whose step takes so long."""
        whole_ms = self.forward_ms + self.input_backward_ms + self.weight_backward_ms
        return 1 - self.num_microbatches * whole_ms / cost_ms

    def laid_out(self, schedule: Schedule, parts: float = 1.0) -> Timeline:
        """A schedule with these times and messages, in milliseconds."""
        return replay(schedule, self.times_ms(parts), self.link)


# Times, layers, hidden size and heads as in the authors' script that printed the table.
SETTINGS = (
    Setting("1.5B", 8, 24, 18.522, 18.086, 9.337, 0.601, 24, 2304, 24),
    Setting("1.5B", 8, 32, 18.513, 18.086, 9.331, 0.626, 24, 2304, 24),
    Setting("1.5B", 8, 64, 18.546, 18.097, 9.321, 0.762, 24, 2304, 24),
    Setting("6.2B", 8, 24, 29.718, 29.444, 19.927, 0.527, 32, 4096, 32),
    Setting("6.2B", 8, 32, 29.802, 29.428, 19.530, 0.577, 32, 4096, 32),
    Setting("6.2B", 8, 64, 29.935, 29.621, 19.388, 0.535, 32, 4096, 32),
    Setting("14.6B", 16, 48, 11.347, 11.248, 8.132, 0.377, 48, 5120, 40),
    Setting("14.6B", 16, 64, 11.307, 11.254, 8.101, 0.379, 48, 5120, 40),
    Setting("14.6B", 16, 128, 11.325, 11.308, 8.109, 0.378, 48, 5120, 40),
    Setting("28.3B", 32, 96, 10.419, 10.207, 7.715, 0.408, 64, 6144, 48),
    Setting("28.3B", 32, 128, 10.408, 10.204, 7.703, 0.408, 64, 6144, 48),
    Setting("28.3B", 32, 256, 10.402, 10.248, 7.698, 0.460, 64, 6144, 48),
)
"""Table 5."""
HALVES = (
    Setting("6.2B", 16, 48, 14.407, 14.380, 9.676, 1.610, 32, 4096, 32),
    Setting("14.6B", 24, 72, 6.763, 6.969, 5.251, 0.755, 48, 5120, 40),
    Setting("28.3B", 32, 96, 9.458, 9.748, 7.288, 0.879, 64, 6144, 48),
)
"""Table 8: times of half a worker's layers, of which ZB-V makes a stage."""
SPEED_COLUMNS = tuple(SETTINGS[place].column for place in (0, 2, 3, 5, 6, 9))
"""Settings of Table 5 whose speeds Table 4 prints."""

NOTES = {
    "1F1B": "Replayed.",
    "1F1B-I": (
        "Replayed, less one message per worker: in the authors' script only the first micro-batch of a group "
        "waits for the message from the last worker to the first."
    ),
    "ZB-H1": "Replayed.",
    "ZB-H2": "Replayed; the longest span of a worker, which keeps its skew from step to step.",
    "ZB-1p": "The shortest that the generator finds within the activations of 1F1B, replayed.",
    "ZB-2p": "The shortest that was found within twice the activations of 1F1B, replayed.",
    "ZB-V": "The hand-written rows, replayed; the longest span of a worker.",
}
"""By schedule, as the paper names them; all but the last are the columns of Table 5."""


def cases(smoke: bool) -> list[Case]:
    of_models = [
        Case({"part": PART, "what": RATES, "model": model}, seconds) for model, seconds in SECONDS.items()
    ]
    others = {RATES_V: 4.0, FORMULAS: 1.0, ELSEWHERE: 1.0}
    rest = [Case({"part": PART, "what": what}, seconds) for what, seconds in others.items()]
    return [*of_models[: 1 if smoke else None], *rest]


def run(key: dict[str, Scalar]) -> Outcome:
    """The answers to all rows of a case."""
    others: dict[str, Callable[[], Iterator[Row]]] = {
        RATES_V: of_vee, FORMULAS: beyond.formulas, ELSEWHERE: of_projects,
    }  # fmt: skip
    found = others.get(str(key["what"]), lambda: rates(str(key["model"])))
    return outcome(
        [
            computed(
                row, column, value, unit, what, over(OPEN, tried) if tried else None,
                "modelled" if row in beyond.MODELLED else "replayed",
            )
            for row, column, value, unit, what, tried in found()
        ]
    )  # fmt: skip


def cells(records: Sequence[Record]) -> list[Answer]:
    """An entry for every answer on record whose number was published, and could be had."""
    return [
        replace(
            each,
            table=SPEEDS if "throughput of" in each.row else each.table,
            not_comparable=WHOLE if each.row.endswith("over 1F1B, memory") else "",
        )
        for record in of_case(records, "done", part=PART)
        for each in answers(record, str(record.case["what"]), source="others", question="as published")
        if not each.row.endswith("all messages")
        and not (each.row.endswith("of 1F1B-I") and each.column not in SPEED_COLUMNS)
    ]


def rates(model: str) -> Iterator[Row]:
    """Table 5's rates, and Table 4's and 12's speeds that follow from the same costs."""
    for setting in (each for each in SETTINGS if each.model == model):
        column = setting.column
        costs = {name: cost_ms(name, setting) for name in NOTES if name != "ZB-V"}
        for name, step_ms in costs.items():
            yield f"bubble rate of {name}", column, setting.rate(step_ms), "ratio", NOTES[name], ()
        every = setting.rate(interleaved_ms(setting))
        note = "Megatron's order replayed with every message"
        yield "bubble rate of 1F1B-I, all messages", column, every, "ratio", note, ()
        for name in ("1F1B-I", "ZB-1p", "ZB-2p") if column in SPEED_COLUMNS else ():
            row, note = f"throughput of {name} over 1F1B", "The quotient of the replayed costs."
            yield row, column, costs["1F1B"] / costs[name], "ratio", note, ()
    for number in (2, 4, 8) if model == "1.5B" else ():
        yield (
            "throughput of zero bubble over 1F1B, m <= p", f"1.5B, p=8, m={number}",
            with_few_microbatches(SETTINGS[0], number), "ratio",
            "The generator's schedule over 1F1B, with the times that were profiled for m = 24.", (),
        )  # fmt: skip


def of_vee() -> Iterator[Row]:
    """Table 8: 1F1B with both halves as one stage, and ZB-V."""
    for setting in HALVES:
        for name, parts in (("1F1B", 0.5), ("ZB-V", 1.0)):
            schedule = named(name.lower(), setting.num_workers, setting.num_microbatches)
            rate = setting.rate(span(setting.laid_out(schedule, parts)) / 2)
            yield f"bubble rate of {name}", setting.column, rate, "ratio", NOTES[name], ()


def cost_ms(name: str, setting: Setting) -> float:
    """The step of a schedule of Table 5, one stage per worker but for 1F1B-I."""
    if name == "1F1B-I":
        return interleaved_ms(setting) - setting.num_workers * setting.message_ms
    if name in ("ZB-1p", "ZB-2p"):
        return searched_ms(setting, 1 if name == "ZB-1p" else 2)
    return span(setting.laid_out(named(name.lower(), setting.num_workers, setting.num_microbatches)))


def interleaved_ms(setting: Setting) -> float:
    """Megatron's order with a stage per layer, in which every message takes its time. In the authors'
    simulation only the first micro-batch of each group waits for the message from the last worker to the
    first, which is a message per worker less.
    """
    turns = setting.num_layers // setting.num_workers
    schedule = named("interleaved", setting.num_workers, setting.num_microbatches, stages_per_worker=turns)
    return setting.laid_out(schedule, turns).makespan_s


def searched_ms(setting: Setting, share: int) -> float:
    """The shortest span that is found within `share` times the activations of 1F1B: ZB-1p and ZB-2p.

    As many graphs as that are safe; more fit as long as only their weights wait, which hold less. The
    authors' own search starts from solutions of an integer program.
    """
    num_workers, number = setting.num_workers, setting.num_microbatches
    place, times, room = tuple(range(num_workers)), setting.times_ms(), share * num_workers
    best = span(setting.laid_out(generate(place, number, times, setting.link, most_alive=room)))
    messages = [setting.message_ms] * (num_workers - 1)
    each = {kind: [ms] * num_workers for kind, ms in times.items()}
    work = Work(place, number, "never", True, each, messages, messages)
    for first in (room * 3 // 4, room * 13 // 16) if share > 1 else ():
        lead = tuple(max(1, first - 3 * worker // 2) for worker in range(num_workers))
        alive = (room * 5 // 4,) * num_workers
        for forwards_first in (True, False):
            policy = Policy(alive=alive, lead=lead, patience=1.0, forwards_first=forwards_first)
            try:
                found = Schedule("searched", num_workers, number, "never", rows(work, policy))
            except StuckError:
                continue
            if held(found, setting) <= room:
                best = min(best, span(setting.laid_out(found)))
    return best


def held(schedule: Schedule, setting: Setting) -> float:
    """The most that a worker holds, in activations of one micro-batch on one worker."""
    more = {Kind.F: 1.0, Kind.I: setting.waiting_share - 1, Kind.W: -setting.waiting_share}
    most = 0.0
    for row in schedule.actions:
        now = 0.0
        for action in row:
            now += more.get(action.kind, 0.0)
            most = max(most, now)
    return most


def with_few_microbatches(setting: Setting, num_microbatches: int) -> float:
    """How many times as fast as 1F1B the best schedule without a cap is with m <= p micro-batches."""
    place = tuple(range(setting.num_workers))
    best = generate(place, num_microbatches, setting.times_ms(), setting.link)
    one = named("1f1b", setting.num_workers, num_microbatches)
    return span(setting.laid_out(one)) / span(setting.laid_out(best))


OLMO, TITAN, PRIMUS = "OLMo-core, K=4, M=8", "torchtitan, 405B, K=8", "Primus, Llama2-7B, K=8"
NUM_WORKERS, MICROBATCHES, TURNS = 8, (8, 16, 32, 64), (2, 4, 8)
AT_PRIMUS = ("interleaved", "zb-v", "v-half", "v-min")
MOST_IN_VEE = 9
"""Stages' micro-batches that a worker holds in the V: the least with which a schedule of whole backwards has
the bubble that is published."""


def of_projects() -> Iterator[Row]:
    """What other projects print."""
    loop, wholes = named("interleaved", 4, 8), generate(vee(4), 8, split=False, most_alive=MOST_IN_VEE)
    what = f"generated for whole backwards and at most {MOST_IN_VEE} stages' micro-batches per worker"
    idle = 100 * in_slots(loop).bubble, 100 * in_slots(wholes).bubble
    yield "bubble, stages in a loop", OLMO, idle[0], "%", "interleaved, two stages per worker", ()
    yield "bubble, stages in a V", OLMO, idle[1], "%", what, ()
    for worker, alive in enumerate(alive_by_worker(loop)):
        row = f"stages' micro-batches alive, worker {worker}"
        yield row, OLMO, alive, "micro-batches", "interleaved, counted", ()
    printed = (
        ("interleaved", TITAN, MICROBATCHES[:3]),
        *((name, PRIMUS, MICROBATCHES) for name in AT_PRIMUS),
    )
    for name, column, numbers in printed:
        turns = TURNS if name == "interleaved" else (None,)
        speeds, memories = zip(*(_over_1f1b(name, m, v) for m in numbers for v in turns), strict=True)
        what = "equal costs, free messages; what is not stated is a range"
        yield f"{name} over 1F1B, throughput", column, median_high(speeds), "ratio", what, speeds
        if column == PRIMUS:
            what = "graphs alive on the fullest worker, over 1F1B's"
            yield f"{name} over 1F1B, memory", column, median_high(memories), "ratio", what, memories
    yield from beyond.of_others()


def _over_1f1b(name: str, num_microbatches: int, turns: int | None) -> tuple[float, float]:
    """Speed and graphs alive of a schedule over those of 1F1B."""
    one = named("1f1b", NUM_WORKERS, num_microbatches)
    other = named(name, NUM_WORKERS, num_microbatches, stages_per_worker=turns)
    alive = max(alive_by_worker(other)) / (other.num_stages // NUM_WORKERS)
    faster = in_slots(one).makespan_s / in_slots(other).makespan_s
    return faster, alive / min(NUM_WORKERS, num_microbatches)
