"""Valid schedules that nobody would write: random orders of all actions that may come next.

Stages delay or prefer random kinds of actions, so that micro-batches pile up where they do not in known
schedules: recomputed long before their gradient, or with distant halves of a backward.
"""

from __future__ import annotations

import random

from gpipe_bench.pipeline import Action, Kind, Schedule
from gpipe_bench.pipeline.plan.schedule import REMAT_MODES, Remat, of_stages


def _of(name: str, num_microbatches: int, *rows: str) -> Schedule:
    actions = tuple(
        tuple(Action.parse(f"{stage}{action}") for action in row.split()) for stage, row in enumerate(rows)
    )
    return Schedule(name, len(rows), num_microbatches, "never", actions)


def _run(kinds: str, first: int, last: int) -> str:
    """ "F2 F3 F4", or for "IW" "I2 W2 I3 W3 I4 W4"."""
    return " ".join(f"{kind}{m}" for m in range(first, last + 1) for kind in kinds)


# Stage 1 keeps its inputs longer than stage 0 does.
LATE_WEIGHTS = _of(
    "late weights", 4, "F0 F1 I0 W0 F2 I1 W1 F3 I2 W2 I3 W3", f"{_run('FI', 0, 3)} {_run('W', 0, 3)}"
)

# With as many buffers as micro-batches in flight, stage 0 waits with activation 10 in transit until stage 1
# has a buffer for activation 8, and stage 1 with gradient 7 until stage 0 has one for gradient 5.
HELD_UP = _of(
    "held up",
    11,
    f"{_run('F', 0, 7)} {_run('B', 0, 2)} {_run('F', 8, 10)} {_run('B', 3, 10)}",
    f"{_run('F', 0, 7)} {_run('I', 0, 7)} {_run('W', 0, 7)} {_run('FIW', 8, 10)}",
)


def random_placement(generator: random.Random, num_stages: int) -> tuple[int, ...]:
    """Random stages on random workers, at least one on each."""
    num_workers = generator.randint(1, num_stages)
    rest = [generator.randrange(num_workers) for _ in range(num_stages - num_workers)]
    return tuple(generator.sample([*range(num_workers), *rest], num_stages))


def random_remat(generator: random.Random, num_stages: int) -> Remat:
    """A random `remat` for all stages, or one for each."""
    if generator.random() < 0.4:
        return generator.choice(REMAT_MODES)
    return generator.choices(REMAT_MODES, k=num_stages)


def random_schedule(
    generator: random.Random,
    num_stages: int,
    num_microbatches: int,
    remat: Remat | None = None,
    placement: tuple[int, ...] = (),
) -> Schedule:
    """A schedule in which every stage takes its preferred possible action; preferences change.

    A worker receives another one's messages of one direction in the order in which they are sent.
    """
    remat = remat or random_remat(generator, num_stages)
    again = of_stages(remat, num_stages, num_microbatches)
    stages, microbatches = range(num_stages), range(num_microbatches)
    forwards = list(microbatches)
    if generator.random() < 0.3:
        generator.shuffle(forwards)
    backwards = generator.choice([forwards, forwards[::-1], generator.sample(forwards, len(forwards))])
    halved = generator.choice([0.0, 0.5, 1.0])
    split = {(s, m): generator.random() < halved for s in stages for m in microbatches}
    likes = [{kind: generator.choice([0.02, 0.2, 1.0, 5.0]) for kind in Kind} for _ in stages]
    home = placement or tuple(stages)
    rows: list[list[Action]] = [[] for _ in range(max(home) + 1)]
    done: set[Action] = set()
    waiting: dict[tuple[int, int, bool], list[tuple[int, int]]] = {}  # messages by source, target, direction

    def comes(s: int, source: int, m: int, backward: bool) -> bool:
        if home[s] == home[source]:
            return any(Action(source, k, m) in done for k in ((Kind.B, Kind.I) if backward else (Kind.F,)))
        return waiting.get((home[source], home[s], backward), [])[:1] == [(s, m)]

    def pass_on(action: Action) -> None:
        s, m, backward = action.stage, action.microbatch, action.kind in (Kind.B, Kind.I)
        if not backward and action.kind is not Kind.F:
            return
        source, target = (s + 1, s - 1) if backward else (s - 1, s + 1)
        if 0 <= source < num_stages and home[source] != home[s]:
            waiting[home[source], home[s], backward].remove((s, m))
        if 0 <= target < num_stages and home[target] != home[s]:
            waiting.setdefault((home[s], home[target], backward), []).append((target, m))

    def possible(s: int) -> list[Action]:
        found = []
        taken = [action.kind for action in rows[home[s]] if action.stage == s]
        number = taken.count(Kind.F)
        if number < num_microbatches:
            m = forwards[number]
            if s == 0 or comes(s, s - 1, m, False):
                found.append(Action(s, Kind.F, m))
        for m in microbatches:
            if m in again[s] and Action(s, Kind.F, m) in done:
                found.append(Action(s, Kind.R, m))
            if Action(s, Kind.I, m) in done:
                found.append(Action(s, Kind.W, m))
        number = taken.count(Kind.B) + taken.count(Kind.I)
        if number < num_microbatches:
            m = backwards[number]
            maker = Kind.R if m in again[s] else Kind.F
            is_due = s == num_stages - 1 or comes(s, s + 1, m, True)
            if is_due and Action(s, maker, m) in done:
                found.append(Action(s, Kind.I if split[s, m] else Kind.B, m))
        return [action for action in found if action not in done]

    while True:
        choices = [(action, likes[s][action.kind]) for s in stages for action in possible(s)]
        if not choices:
            break
        actions, weights = zip(*choices, strict=True)
        (action,) = generator.choices(actions, weights)
        rows[home[action.stage]].append(action)
        done.add(action)
        pass_on(action)
        if generator.random() < 0.05:
            likes[action.stage] = {kind: generator.choice([0.02, 0.2, 1.0, 5.0]) for kind in Kind}
    return Schedule("random", num_stages, num_microbatches, remat, tuple(map(tuple, rows)), placement)
