"""Searches a short schedule for measured times, a placement, a link and a memory cap.

Integer programs find the best schedule, but take minutes. A list scheduler takes milliseconds: a free worker
runs the best action that it can. Simple preferences under limits produce every known schedule: backwards
first, because other workers wait for them; then forwards, while the worker has memory for them; weight
gradients fill idle time. 1F1B limits how far forwards lead backwards, GPipe does not, zero bubble adds W as a
filler.

So the scheduler runs with a few preferences, the named schedules of the same placement are candidates too,
and all are replayed over the real link; the shortest that keeps to the memory cap is returned. The times are
given: `planner` chooses schedule, partition and re-materialization for a model and machines. Only the
standard library is imported.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import inf

from .links import FREE, Link
from .named import NAMED, named
from .schedule import Action, Kind, Remat, Schedule, check_sizes, most_alive_of, of_stages
from .simulate import SLOTS, ActionTimes, duration_of, replay
from .walk import check_placement, validate


def generate(
    placement: Sequence[int],
    num_microbatches: int,
    action_s: ActionTimes = SLOTS,
    link: Link = FREE,
    *,
    remat: Remat = "never",
    split: bool = True,
    most_alive: int | None = None,
    activation_bytes: Sequence[float] = (),
    gradient_bytes: Sequence[float] = (),
    name: str = "generated",
) -> Schedule:
    """The shortest valid schedule found for these settings.

    Args:
        placement: the worker of each stage, such as `vee(4)`.
        num_microbatches: M.
        action_s: seconds of F, R, I and W (or B) of each stage, as for `replay`.
        link: the link between any two workers.
        remat: which micro-batches are recomputed: "never", "always" or "except_last", or one name for
            each stage.
        split: whether the backward is split into I and W.
        most_alive: the most graphs of a stage and a micro-batch that a worker may hold at a time, from F, or
            R where the micro-batch is recomputed, to the end of the backward; None for any number.
        activation_bytes: of one micro-batch over each boundary, as for `replay`.
        gradient_bytes: of one micro-batch back over each boundary; default: `activation_bytes`.
        name: the schedule's name.

    Raises:
        ValueError: an impossible size, placement or duration, or no schedule is found under the cap.
    """
    place = tuple(placement)
    check_sizes(len(place), num_microbatches, remat)
    check_placement(place, len(place))
    if most_alive is not None and most_alive < 1:
        raise ValueError(f"most_alive is {most_alive}; a worker holds at least 1 graph")
    duration_s, stages = duration_of(action_s), range(len(place))
    kinds = [Kind.F, *((Kind.I, Kind.W) if split else (Kind.B,))]
    seconds = {kind: [duration_s(Action(stage, kind, 0)) for stage in stages] for kind in kinds}
    again = of_stages(remat, len(place), num_microbatches)
    if any(again):
        seconds[Kind.R] = [duration_s(Action(stage, Kind.R, 0)) if again[stage] else 0.0 for stage in stages]
    messages = [activation_bytes or [0.0] * (len(place) - 1)]
    messages.append(gradient_bytes or messages[0])
    ahead_s, back_s = [[link.latency_s + link.occupied_s(each) for each in sizes] for sizes in messages]
    work = _Work(place, num_microbatches, remat, seconds, ahead_s, back_s)

    def cost(each: Schedule) -> tuple[float, int]:
        step = replay(each, action_s, link, activation_bytes=activation_bytes, gradient_bytes=gradient_bytes)
        return step.makespan_s, max(map(most_alive_of, each.actions))

    candidates = [
        each
        for each in _candidates(work, name, most_alive)
        if most_alive is None or max(map(most_alive_of, each.actions)) <= most_alive
    ]
    if not candidates:
        raise ValueError(
            f"no schedule found in which a worker holds at most {most_alive} graphs; give a larger "
            f"most_alive, at least {max(place.count(worker) for worker in place)}, one per stage of a worker"
        )
    best = min(candidates, key=cost)
    validate(best)
    return best


@dataclass(frozen=True)
class _Work:
    """The problem. `seconds` are by kind, for each stage; `ahead_s` and `back_s` are a message's seconds over
    each of the K - 1 boundaries.
    """

    placement: tuple[int, ...]
    num_microbatches: int
    remat: Remat
    seconds: Mapping[Kind, Sequence[float]]
    ahead_s: Sequence[float]
    back_s: Sequence[float]


@dataclass(frozen=True)
class _Policy:
    """Preferences and limits of the list scheduler.

    Args:
        alive: the most graphs that a worker may hold at a time, as `most_alive`.
        lead: by worker, the most micro-batches of its stages between F and I or B; None for any number.
        group: number of micro-batches that pass all stages of a worker before the next ones; None for all.
        patience: 1 runs a filler (W, or an R whose gradient has not come) whenever the worker is free; 0 only
            if it ends before the next action can start; between: how late it may end, as a share of its
            length.
        forwards_first: whether a forward comes before a backward.
    """

    alive: int | None = None
    lead: tuple[int, ...] | None = None
    group: int | None = None
    patience: float = 0.0
    forwards_first: bool = False


def _candidates(work: _Work, name: str, most_alive: int | None) -> Iterator[Schedule]:
    """The named schedules of the same placement and kinds of actions, then those of the list scheduler."""
    place, number = work.placement, work.num_microbatches
    num_workers = max(place) + 1
    per_worker, over = divmod(len(place), num_workers)
    for known, (_, fixed) in NAMED.items():
        if over or fixed not in (None, per_worker):
            continue
        schedule = named(known, num_workers, number, remat=work.remat, stages_per_worker=per_worker)
        homes = schedule.placement or tuple(range(num_workers))
        if homes == place and {action.kind for action in schedule} <= set(work.seconds):
            yield replace(schedule, name=name)
    # Each of these is the best for some problem: 1F1B's lead, with and without groups, both orders, with
    # fillers at once or where they fit.
    groups = (num_workers, None) if len(place) > num_workers else (None,)
    lead = tuple(place.count(worker) * (num_workers - worker) for worker in range(num_workers))
    policies = [_Policy(most_alive, lead, patience=patience) for patience in (1.0, 0.0)]
    policies += [
        _Policy(most_alive, group=group, forwards_first=forwards_first, patience=patience)
        for group, forwards_first, patience in product(groups, (False, True), (1.0, 0.0))
    ]
    for policy in policies:
        actions = _ListScheduler(work, policy).rows()
        if actions is not None:
            yield Schedule(name, len(place), number, work.remat, actions, place)


_Choice = tuple[float, tuple[float, ...], Action]  # start, rank (least first), action


class _ListScheduler:
    """The state of one run: the ends of actions, and what each worker holds."""

    def __init__(self, work: _Work, policy: _Policy) -> None:
        self.work, self.policy = work, policy
        place, num_stages, number = work.placement, len(work.placement), work.num_microbatches
        self.stages = [[s for s, home in enumerate(place) if home == w] for w in range(max(place) + 1)]
        self.deeper = [len(self.stages[w]) - 1 - self.stages[w].index(s) for s, w in enumerate(place)]
        self.again = of_stages(work.remat, num_stages, number)
        self.back = Kind.I if Kind.I in work.seconds else Kind.B
        self.taken: Counter[tuple[int, Kind]] = Counter()  # micro-batches of a stage, in order
        self.done_s: dict[Action, float] = {}
        # When each action's message arrives.
        self.there_s = {Action(0, Kind.F, m): 0.0 for m in range(number)}
        self.there_s |= {Action(num_stages - 1, self.back, m): 0.0 for m in range(number)}
        # The receiving stages of messages in transit between two workers, by direction, in order.
        self.channels: defaultdict[tuple[int, int, bool], deque[int]] = defaultdict(deque)
        self.free_s = [0.0] * len(self.stages)
        self.alive, self.lead = [0] * len(self.stages), [0] * len(self.stages)

    def rows(self) -> tuple[tuple[Action, ...], ...] | None:
        """A row for each worker; None if the policy's limits stop all workers."""
        work, rows = self.work, tuple(list[Action]() for _ in self.stages)
        kinds = len(work.seconds) - (Kind.R in work.seconds)
        best = [self._best(worker) for worker in range(len(rows))]
        for _ in range(len(self.deeper) * kinds * work.num_microbatches + sum(map(len, self.again))):
            able = [(*choice, worker) for worker, choice in enumerate(best) if choice is not None]
            if not able:
                return None
            start_s, _, action, worker = min(able, key=lambda each: (each[0], each[1], each[3]))
            rows[worker].append(action)
            for changed in self._take(worker, start_s, action):
                best[changed] = self._best(changed)
        return tuple(map(tuple, rows))

    def _take(self, w: int, start_s: float, action: Action) -> set[int]:
        """Takes an action; returns workers whose choices change. Messages within a worker take no time."""
        s, kind, m = action
        place, is_forward, is_back = self.work.placement, kind is Kind.F, kind is self.back
        end_s = self.free_s[w] = self.done_s[action] = start_s + self.work.seconds[kind][s]
        self.taken[s, kind] += 1
        self.lead[w] += is_forward - is_back
        self.alive[w] += (kind is Kind.R) or (is_forward and m not in self.again[s])
        self.alive[w] -= kind in (Kind.B, Kind.W)
        if not (is_forward or is_back):
            return {w}
        source, target = (s - 1, s + 1) if is_forward else (s + 1, s - 1)
        if 0 <= source < len(place) and place[source] != w:
            self.channels[place[source], w, is_forward].popleft()
        if not 0 <= target < len(place):
            return {w}
        link_s = 0.0
        if place[target] != w:
            self.channels[w, place[target], is_forward].append(target)
            link_s = self.work.ahead_s[s] if is_forward else self.work.back_s[target]
        self.there_s[Action(target, kind, m)] = end_s + link_s
        return {w, place[target]}

    def _arrival_s(self, action: Action) -> float | None:
        """When an action's message arrives, if it is the next of its channel; else None."""
        place, is_forward = self.work.placement, action.kind is Kind.F
        source, target = action.stage - 1 if is_forward else action.stage + 1, action.stage
        if action not in self.there_s or not 0 <= source < len(place) or place[source] == place[target]:
            return self.there_s.get(action)
        is_next = self.channels[place[source], place[target], is_forward][0] == target
        return self.there_s[action] if is_next else None

    def _best(self, w: int) -> _Choice | None:
        """The worker's next action and its start, as far as known; None if it has to wait."""
        policy, free_s, number = self.policy, self.free_s[w], self.work.num_microbatches
        most_alive = inf if policy.alive is None else policy.alive
        most_lead = inf if policy.lead is None else policy.lead[w]
        choices: list[_Choice] = []
        fillers: list[_Choice] = []
        group = policy.group or number
        for s in self.stages[w]:
            rank: tuple[float, ...]
            m = self.taken[s, self.back]
            forward_s, arrival_s = self.done_s.get(Action(s, Kind.F, m)), None
            if forward_s is not None:
                backward, again = Action(s, self.back, m), Action(s, Kind.R, m)
                arrival_s = self._arrival_s(backward)
                built_s = self.done_s.get(again) if m in self.again[s] else forward_s
                if built_s is None:
                    if self.alive[w] < most_alive:
                        due = arrival_s is not None and arrival_s <= free_s
                        rank = (0.5 if due else 2.0, m // group, -s, m)
                        (choices if due else fillers).append((max(forward_s, free_s), rank, again))
                elif arrival_s is not None:
                    choices.append((max(arrival_s, built_s, free_s), (0.0, m // group, -s, m), backward))
            m = self.taken[s, Kind.F]
            forward = Action(s, Kind.F, m)
            has_room = m in self.again[s] or self.alive[w] + self.deeper[s] < most_alive
            if has_room and self.lead[w] + self.deeper[s] < most_lead:
                arrival_s = self._arrival_s(forward)
                if arrival_s is not None:
                    urgency = -1.0 if policy.forwards_first else 1.0
                    choices.append((max(arrival_s, free_s), (urgency, m // group, -s, m), forward))
            m = self.taken[s, Kind.W]
            if self.back is Kind.I and m < self.taken[s, Kind.I]:
                fillers.append((free_s, (3.0, m, -s, m), Action(s, Kind.W, m)))
        # When the first action starts that is neither a filler nor a recomputation.
        soon_s = min([start_s for start_s, _, action in choices if action.kind is not Kind.R], default=inf)
        for start_s, rank, action in fillers:
            late_s = (1 - policy.patience) * self.work.seconds[action.kind][action.stage]
            if not start_s < soon_s < start_s + late_s - 1e-9 * late_s:
                choices.append((start_s, rank, action))
        return min(choices, default=None)
