"""A list scheduler: whenever a worker is free, it takes the best of what it can take.

Every known schedule is what comes of simple preferences under limits. A backward goes first, because other
workers wait for it; a forward next, as long as the worker has room for what it keeps; the weights' half fills
what would be idle. 1F1B is a limit on how far the forwards may lead the backwards, GPipe none, zero bubble
the same limits with W as a filler. So one loop makes all of them, for any placement and for measured times.
Only the standard library is imported.

Two workers with one stage each, M = 3, every action one slot, forwards that lead by 2 and 1 at most:

    stage 0 | F0 F1 .  I0 F2 I1 W0 I2 W1 W2
    stage 1 | .  F0 I0 F1 I1 F2 I2 W0 W1 W2
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf

from .remat import Remat, of_stages
from .schedule import Action, Kind


@dataclass(frozen=True)
class Work:
    """The actions to schedule, and their durations.

    Args:
        placement: the worker of each stage.
        num_microbatches: M.
        remat: which micro-batches are recomputed.
        split: whether the backward is I and W, or else B.
        seconds: by kind, of each stage.
        activation_s: what a message takes to the stage behind, for each of the K - 1 boundaries.
        gradient_s: the same for the way back.
    """

    placement: tuple[int, ...]
    num_microbatches: int
    remat: Remat
    split: bool
    seconds: Mapping[Kind, Sequence[float]]
    activation_s: Sequence[float]
    gradient_s: Sequence[float]


@dataclass(frozen=True)
class Policy:
    """The preferences of a worker, and its limits.

    Args:
        alive: for each worker, the most graphs of its stages that may be alive, from F (or R, where the
            micro-batch is recomputed) to the end of the backward; None for any number.
        lead: for each worker, the most micro-batches of its stages between F and I or B; None for any number.
        group: micro-batches that pass through all stages of a worker before the next ones; None for all.
        patience: the share of its own length by which a filler (W, or an R whose gradient has not come) may
            delay what is known to arrive: 1 takes it whenever the worker is free, 0 only where it fits.
        forwards_first: whether a forward comes before a backward.
    """

    alive: tuple[int, ...] | None = None
    lead: tuple[int, ...] | None = None
    group: int | None = None
    patience: float = 0.0
    forwards_first: bool = False


_Choice = tuple[float, tuple[float, ...], Kind, int]  # start, rank (the least first), kind, stage


class StuckError(Exception):
    """No worker can go on: the limits are too tight for this order of preferences."""


def rows(work: Work, policy: Policy) -> tuple[tuple[Action, ...], ...]:
    """A row for each worker. Raises `StuckError` if the policy's limits leave no way on."""
    return _ListScheduler(work, policy).run()


class _ListScheduler:
    """The state of one run: times at which things are done, and counts of what each worker holds."""

    def __init__(self, work: Work, policy: Policy) -> None:
        self.work, self.policy = work, policy
        place, self.num_stages = work.placement, len(work.placement)
        self.num_workers = max(place) + 1
        self.stages = [[s for s in range(self.num_stages) if place[s] == w] for w in range(self.num_workers)]
        self.deeper = [len(self.stages[w]) - 1 - self.stages[w].index(s) for s, w in enumerate(place)]
        self.again = of_stages(work.remat, self.num_stages, work.num_microbatches)
        self.backward = Kind.I if work.split else Kind.B
        stages = range(self.num_stages)
        # The next micro-batch of each kind on each stage, and when what has been done ends.
        self.next_f, self.next_r, self.next_b, self.next_w = ([0 for _ in stages] for _ in range(4))
        self.inputs_s: list[list[float]] = [[] for _ in stages]  # arrival, by micro-batch
        self.inputs_s[0] = [0.0] * work.num_microbatches
        self.gradients_s: list[list[float]] = [[] for _ in stages]
        self.done_f_s: list[list[float]] = [[] for _ in stages]
        self.done_r_s: list[dict[int, float]] = [{} for _ in stages]
        self.free_s = [0.0] * self.num_workers
        self.alive = [0] * self.num_workers
        self.lead = [0] * self.num_workers
        self.most_alive = policy.alive or (self.num_stages * work.num_microbatches,) * self.num_workers
        self.most_lead = policy.lead or (self.num_stages * work.num_microbatches,) * self.num_workers
        self.rows: list[list[Action]] = [[] for _ in range(self.num_workers)]
        # The stages for which messages are under way from worker to worker, each direction for itself: they
        # are taken in that order.
        self.channels: defaultdict[tuple[int, int, bool], deque[int]] = defaultdict(deque)

    def run(self) -> tuple[tuple[Action, ...], ...]:
        kinds = 3 if self.work.split else 2
        total = self.num_stages * kinds * self.work.num_microbatches + sum(map(len, self.again))
        best: list[_Choice | None] = [None] * self.num_workers
        heap: list[tuple[float, tuple[float, ...], int]] = []
        changed = set(range(self.num_workers))
        for _ in range(total):
            for w in changed:
                choice = best[w] = self._best(w)
                if choice is not None:
                    heappush(heap, (choice[0], choice[1], w))
            while heap:
                start_s, rank, worker = heappop(heap)
                choice = best[worker]
                if choice is not None and choice[:2] == (start_s, rank):
                    break
            else:
                raise StuckError
            assert choice is not None
            changed = self._take(worker, start_s, *choice[2:])
        return tuple(map(tuple, self.rows))

    def _take(self, w: int, start_s: float, kind: Kind, s: int) -> set[int]:
        """Books an action; returns the workers for which it makes a difference."""
        end_s = self.free_s[w] = start_s + self.work.seconds[kind][s]
        if kind is Kind.F:
            m, counts = self.next_f[s], self.next_f
            self.done_f_s[s].append(end_s)
            self.lead[w] += 1
            self.alive[w] += m not in self.again[s]
        elif kind is Kind.R:
            m, counts = self.next_r[s], self.next_r
            self.done_r_s[s][m] = end_s
            self.alive[w] += 1
        elif kind is Kind.W:
            m, counts = self.next_w[s], self.next_w
            self.alive[w] -= 1
        else:
            m, counts = self.next_b[s], self.next_b
            self.lead[w] -= 1
            self.alive[w] -= kind is Kind.B
            # What is not recomputed has nothing to wait for.
            self.next_r[s] = max(self.next_r[s], m + 1)
        counts[s] += 1
        self.rows[w].append(Action(s, kind, m))
        if kind is Kind.F or kind is self.backward:
            return {w, *self._pass_on(s, kind is Kind.F, end_s)}
        return {w}

    def _pass_on(self, s: int, ahead: bool, end_s: float) -> list[int]:
        """Takes what the stage needed off its channel, and puts what it has made on the next one; returns the
        worker that it is for. What stays on a worker takes no time.
        """
        place, (source, target) = self.work.placement, (s - 1, s + 1) if ahead else (s + 1, s - 1)
        if 0 <= source < self.num_stages and place[source] != place[s]:
            self.channels[place[source], place[s], ahead].popleft()
        if not 0 <= target < self.num_stages:
            return []
        link_s = 0.0
        if place[target] != place[s]:
            self.channels[place[s], place[target], ahead].append(target)
            link_s = self.work.activation_s[s] if ahead else self.work.gradient_s[target]
        (self.inputs_s if ahead else self.gradients_s)[target].append(end_s + link_s)
        return [place[target]]

    def _is_next(self, source: int, target: int, ahead: bool) -> bool:
        """Whether the first message of the channel that has not been taken is for stage `target`."""
        a, b = self.work.placement[source], self.work.placement[target]
        return a == b or self.channels[a, b, ahead][0] == target

    def _best(self, w: int) -> _Choice | None:
        """When and what the worker takes next, as far as is known; None if it has to wait."""
        policy, free_s, number = self.policy, self.free_s[w], self.work.num_microbatches
        choices: list[_Choice] = []
        soon_s = inf  # when the first action starts that is no filler
        fillers: list[_Choice] = []
        group = policy.group or number
        for s in self.stages[w]:
            m, done_f_s, arrivals_s = self.next_b[s], self.done_f_s[s], self.gradients_s[s]
            if m < len(done_f_s):
                is_last, again = s == self.num_stages - 1, m in self.again[s]
                known = is_last or (len(arrivals_s) > m and self._is_next(s + 1, s, False))
                built_s = self.done_r_s[s].get(m) if again else done_f_s[m]
                if built_s is None:
                    if self.alive[w] < self.most_alive[w]:
                        due = known and (is_last or arrivals_s[m] <= free_s)
                        rank = (0.5 if due else 2.0, m // group, -s, m)
                        (choices if due else fillers).append((max(done_f_s[m], free_s), rank, Kind.R, s))
                elif known:
                    start_s = max(0.0 if is_last else arrivals_s[m], built_s, free_s)
                    soon_s = min(soon_s, start_s)
                    choices.append((start_s, (0.0, m // group, -s, m), self.backward, s))
            m = self.next_f[s]
            if (
                m < len(self.inputs_s[s])
                and (not s or self._is_next(s - 1, s, True))
                and self.lead[w] + self.deeper[s] < self.most_lead[w]
                and (m in self.again[s] or self.alive[w] + self.deeper[s] < self.most_alive[w])
            ):
                start_s = max(self.inputs_s[s][m], free_s)
                soon_s = min(soon_s, start_s)
                urgency = -1.0 if policy.forwards_first else 1.0
                choices.append((start_s, (urgency, m // group, -s, m), Kind.F, s))
            m = self.next_w[s]
            if self.work.split and m < self.next_b[s]:
                fillers.append((free_s, (3.0, m, -s, m), Kind.W, s))
        for choice in fillers:
            late_s = (1 - policy.patience) * self.work.seconds[choice[2]][choice[3]]
            if not choice[0] < soon_s < choice[0] + late_s - 1e-9 * late_s:
                choices.append(choice)
        return min(choices, default=None)
