"""What the zero-bubble paper published, with the profiled times that it follows from.

Qi et al., Zero Bubble Pipeline Parallelism (arXiv 2401.10241), print the seconds of a forward, of both halves
of a backward and of a message for each of their models on A100s, and the share of a worker's time that each
schedule then leaves idle: (cost - m (F + B + W)) / cost. Their cost is the longest span of a worker, from its
first action to its last, and not the makespan: a schedule may keep its skew from step to step. Only ZB-H2 and
ZB-V differ in that. Nothing is unknown, so the replay must come to the same rates; what was found by a search
(ZB-1p, ZB-2p, ZB-V) another search may miss or beat.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gpipe_bench.pipeline.plan.links import Link
from gpipe_bench.pipeline.plan.replay import replay
from gpipe_bench.pipeline.plan.schedule import Kind, Schedule
from gpipe_bench.pipeline.plan.schedules.generator import generate
from gpipe_bench.pipeline.plan.schedules.known import named
from gpipe_bench.pipeline.plan.schedules.listing import Policy, StuckError, Work, rows
from gpipe_bench.pipeline.plan.timeline import Timeline

SEQUENCE = 1024
Times = dict[Kind, float]


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
    def work_ms(self) -> float:
        """What each worker computes in a step."""
        return self.num_microbatches * self._whole_ms

    @property
    def _whole_ms(self) -> float:
        return self.forward_ms + self.input_backward_ms + self.weight_backward_ms

    @property
    def waiting_share(self) -> float:
        """What a micro-batch holds from the first half of its backward to the second, of what it holds
        before: their 32 h of 34 h + 5 a s.
        """
        return 32 * self.hidden_size / (34 * self.hidden_size + 5 * self.num_heads * SEQUENCE)

    def times_ms(self, parts: float = 1.0) -> Times:
        """Of an action where a worker's layers are cut into `parts` stages."""
        return {
            Kind.F: self.forward_ms / parts,
            Kind.B: (self.input_backward_ms + self.weight_backward_ms) / parts,
            Kind.I: self.input_backward_ms / parts,
            Kind.W: self.weight_backward_ms / parts,
        }

    def rate(self, cost_ms: float) -> float:
        """Idle share of a worker whose step takes so long."""
        return 1 - self.work_ms / cost_ms


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


def span_ms(timeline: Timeline) -> float:
    """The longest time of a worker from its first action to its last: the paper's cost."""
    ends = (timeline.of_worker(worker) for worker in range(timeline.num_workers))
    return max(events[-1].end_s - events[0].start_s for events in ends)


def cost_ms(name: str, setting: Setting) -> float:
    """The step of a named schedule with one stage per worker."""
    schedule = named(name, setting.num_workers, setting.num_microbatches)
    return span_ms(replay(schedule, setting.times_ms(), setting.link))


def interleaved_ms(setting: Setting) -> float:
    """1F1B-I with a stage per layer. In the authors' simulation only the first micro-batch of each group
    waits for the message from the last worker to the first, which is a message per worker less than in
    Megatron's order; `interleaved_with_all_messages_ms` has them.
    """
    return interleaved_with_all_messages_ms(setting) - setting.num_workers * setting.message_ms


def interleaved_with_all_messages_ms(setting: Setting) -> float:
    """The replay of Megatron's order, in which every message takes its time."""
    turns = setting.num_layers // setting.num_workers
    schedule = named("interleaved", setting.num_workers, setting.num_microbatches, stages_per_worker=turns)
    return replay(schedule, setting.times_ms(turns), setting.link).makespan_s


def searched_ms(setting: Setting, share: int) -> float:
    """The shortest span that is found within `share` times the activations of 1F1B: ZB-1p and ZB-2p.

    As many graphs as that are safe; more fit as long as only their weights wait, which hold less. The
    authors' own search starts from solutions of an integer program.
    """
    num_workers, number = setting.num_workers, setting.num_microbatches
    times, room = setting.times_ms(), share * num_workers
    safe = generate(tuple(range(num_workers)), number, times, setting.link, most_alive=room)
    best = span_ms(replay(safe, times, setting.link))
    messages = [setting.message_ms] * (num_workers - 1)
    work = Work(
        tuple(range(num_workers)), number, "never", True,
        {kind: [ms] * num_workers for kind, ms in times.items()}, messages, messages,
    )  # fmt: skip
    for first in (room * 3 // 4, room * 13 // 16) if share > 1 else ():
        lead = tuple(max(1, first - 3 * worker // 2) for worker in range(num_workers))
        for forwards_first in (True, False):
            policy = Policy(
                alive=(room * 5 // 4,) * num_workers, lead=lead, patience=1.0, forwards_first=forwards_first
            )
            try:
                found = Schedule("searched", num_workers, number, "never", rows(work, policy))
            except StuckError:
                continue
            if held(found, setting) <= room:
                best = min(best, span_ms(replay(found, times, setting.link)))
    return best


def held(schedule: Schedule, setting: Setting) -> float:
    """The most that a worker holds, in activations of one micro-batch on one worker."""
    most = 0.0
    for row in schedule.actions:
        now = 0.0
        for action in row:
            match action.kind:
                case Kind.F:
                    now += 1
                case Kind.I:
                    now -= 1 - setting.waiting_share
                case Kind.W:
                    now -= setting.waiting_share
            most = max(most, now)
    return most


COSTS: dict[str, Callable[[Setting], float]] = {
    "1F1B": lambda setting: cost_ms("1f1b", setting),
    "1F1B-I": interleaved_ms,
    "ZB-H1": lambda setting: cost_ms("zb-h1", setting),
    "ZB-H2": lambda setting: cost_ms("zb-h2", setting),
    "ZB-1p": lambda setting: searched_ms(setting, 1),
    "ZB-2p": lambda setting: searched_ms(setting, 2),
}
"""Milliseconds of a step, by the columns of Table 5."""


def vee_rates(setting: Setting) -> dict[str, float]:
    """Of one of `HALVES`: 1F1B with both halves as one stage, and ZB-V."""
    whole = {kind: 2 * ms for kind, ms in setting.times_ms().items()}
    one = named("1f1b", setting.num_workers, setting.num_microbatches)
    vee = named("zb-v", setting.num_workers, setting.num_microbatches)
    work_ms = 2 * setting.work_ms
    return {
        "1F1B": 1 - work_ms / span_ms(replay(one, whole, setting.link)),
        "ZB-V": 1 - work_ms / span_ms(replay(vee, setting.times_ms(), setting.link)),
    }


def with_few_microbatches(setting: Setting, num_microbatches: int) -> float:
    """How many times as fast as 1F1B the best schedule without a cap is with m <= p micro-batches."""
    times, place = setting.times_ms(), tuple(range(setting.num_workers))
    one = named("1f1b", setting.num_workers, num_microbatches)
    best = generate(place, num_microbatches, times, setting.link)
    return span_ms(replay(one, times, setting.link)) / span_ms(replay(best, times, setting.link))
