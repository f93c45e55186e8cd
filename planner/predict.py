"""Predicts a candidate's step: its real schedule laid out with the costs of its layers, and workers' peaks.

Layers add up to stages, an action costs a little more once, messages take the link, the gradients of
replicas are summed as their buckets leave, and the optimizer ends the step. What a replay of medians leaves
out is that actions are never all at their median, and a pipeline waits for whichever is late: so a measured
machine's jitter is drawn from the steps in which the layers were timed, and the step is the median of the
draws:

    step_s = median over draws of replay(seconds of each action x how that action differed in one timed step)

Of costs without jitter it is the replay itself. The bytes are those of the memory model over processes.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from statistics import median
from typing import Any

from gpipe_bench.pipeline.plan.schedule import Action, Kind
from gpipe_bench.pipeline.plan.simulate import replay
from gpipe_bench.pipeline.plan.timeline import Timeline
from gpipe_bench.planner.breakdown import breakdown
from gpipe_bench.planner.candidate import Candidate, Prediction, splits
from gpipe_bench.planner.collectives import Collectives
from gpipe_bench.planner.costs import Costs, inside, kinds_of
from gpipe_bench.planner.request import Request, Topology

DRAWS = 64
"""Number of simulated steps whose median is the prediction, where there is jitter."""
SEED = 1811


class Layout:
    """One candidate with its costs, ready to be laid out at any speed of its workers.

    ValueError for a micro-batch size, a kind of action or a grid that the costs know nothing of.
    """

    def __init__(self, candidate: Candidate, costs: Costs, request: Request) -> None:
        if candidate.cut[-1].stop != costs.num_layers:
            raise ValueError(f"the cut holds {candidate.cut[-1].stop} layers, the costs {costs.num_layers}")
        self.schedule = candidate.rows()
        self.size = candidate.microbatch_size(request.batch_size)
        costs = costs.on(self.size, candidate.tp, sharded=request.gathers_half(candidate.fsdp))
        self.candidate, self.costs = candidate, costs
        self.at = costs.at(self.size)
        self.kinds = kinds_of(self.schedule)
        self.topology = Topology(request, candidate.grid, costs.sums_beside(request.link))
        self._shards = costs.shards(self.size, candidate.fsdp, candidate.fsdp_level, request.link)
        split = splits(candidate.schedule)
        ahead = request.accelerated  # a CPU gathers and computes in turn
        self._collectives = Collectives(
            candidate.grid, self.topology, costs, self.size, split=split, ahead=ahead, shards=self._shards
        )
        if split and self._collectives.every_pass:
            raise ValueError(
                f"schedule {candidate.schedule!r} splits backwards, and its W would find its parameters "
                "sharded: gather once in a step (ZeRO-2)"
            )
        known = {
            (stage, kind): self.at.seconds(inside(kind, candidate.remat[stage]), candidate.cut[stage])
            + costs.gap_s
            for stage, kind in {(action.stage, kind) for action, kind in self.kinds.items()}
        }
        update_s = [each / candidate.fsdp for each in costs.update_s]
        if self._shards is not None:
            for stage, kind in known:
                more_s = self._shards.more(kind, candidate.cut[stage])
                known[stage, kind] = max(0.0, known[stage, kind] + more_s)
            update_s = list(self._shards.update_s)
        self.action_s = {action: known[action.stage, kind] for action, kind in self.kinds.items()}
        self._update_s = [sum(update_s[span.start : span.stop]) for span in candidate.cut]
        self._setup_s = [costs.step_s] + [0.0] * (candidate.num_stages - 1)

    def timeline(
        self, speeds: Sequence[float] | None = None, factors: dict[Action, float] | None = None
    ) -> Timeline:
        """The step.

        Args:
            speeds: of each worker, how many times as long everything takes there
            factors: of each action, likewise; 1 where there is none
        """
        slower = speeds or [1.0] * self.schedule.num_workers
        duration = {
            action: seconds * slower[self.schedule.worker(action.stage)] * (factors or {}).get(action, 1.0)
            for action, seconds in self.action_s.items()
        }
        return replay(self.schedule, duration.__getitem__, self.topology.between, **self._rest(slower))

    def drawn_s(self, draws: int, seed: int = SEED) -> list[float]:
        """Sorted seconds of steps with the jitter of steps that were timed; of one without any."""
        if not self.costs.jitter or draws < 1:
            return [float(self.timeline().makespan_s)]
        generator = random.Random(seed)
        found = []
        for _ in range(draws):
            run = generator.choice(self.costs.jitter)
            factors = {
                action: generator.choice(run[self.schedule.worker(action.stage) % len(run)])
                for action in self.schedule
            }
            found.append(float(self.timeline(factors=factors).makespan_s))
        return sorted(found)

    def parts_s(self, step_s: float) -> dict[str, float]:
        """Where the time goes, in seconds of the step by reason; what only jitter explains is one of them."""
        split = breakdown(
            self.schedule,
            self.action_s.__getitem__,
            self.topology.between,
            **self._rest([1.0] * self.schedule.num_workers),
        )
        parts = {part: float(share) * split.makespan_s for part, share in split.shares.items()}
        parts["jitter"] = step_s - sum(parts.values())
        return parts

    def _rest(self, slower: Sequence[float]) -> dict[str, Any]:
        """Returns the arguments of the replay other than the actions."""
        candidate, schedule = self.candidate, self.schedule
        worker = [slower[schedule.worker(stage)] for stage in range(schedule.num_stages)]
        ends = [span.stop - 1 for span in candidate.cut[:-1]]
        found: dict[str, Any] = {
            "setup_s": [a * b for a, b in zip(self._setup_s, worker, strict=True)],
            "update_s": [a * b for a, b in zip(self._update_s, worker, strict=True)],
        }
        if self.at.activation_bytes:
            found["activation_bytes"] = [self.at.activation_bytes[end] for end in ends]
        if self.at.gradient_bytes:
            found["gradient_bytes"] = [self.at.gradient_bytes[end] for end in ends]
        stages = candidate.cut
        if candidate.replicas > 1:
            found["reductions"] = list(map(self._collectives.buckets, stages))
        if candidate.fsdp_level == 2:
            found["gathers"] = list(map(self._collectives.gathers, stages))
        if self._collectives.every_pass or candidate.tp > 1:
            waits_s = found["collective_s"] = dict[tuple[int, Kind], float]()
            each_s = map(self._collectives.inside_s, stages, candidate.remat)
            for stage, (ahead_s, back_s) in enumerate(each_s):
                kinds_s = {Kind.F: ahead_s, Kind.R: ahead_s, Kind.B: back_s, Kind.I: back_s, Kind.W: 0.0}
                waits_s |= {(stage, kind): seconds for kind, seconds in kinds_s.items()}
        return found


def predict(
    candidate: Candidate, costs: Costs, request: Request, *, draws: int = DRAWS, parts: bool = True
) -> Prediction:
    """Seconds of a step with their range, bytes of every worker, and where each number comes from.

    Args:
        candidate: complete
        costs: of the micro-batch size that follows from it; without `profiles` there are no bytes, 0 each
        request: machines, mini-batch, optimizer
        draws: steps with jitter of which the median is taken; 0 is the replay of medians, which is quick
        parts: whether to say where the time goes, too

    The range holds 95 % of the drawn steps, and what the costs do not know of themselves.

    Raises:
        ValueError: costs that know nothing of the size, of a kind of action or of the grid.
    """
    layout = Layout(candidate, costs, request)
    drawn = layout.drawn_s(draws)
    step_s = median(drawn)
    edge = round(0.025 * (len(drawn) - 1))
    peaks, when = _peaks(layout, request)
    return Prediction(
        candidate=candidate,
        batch_size=request.batch_size,
        step_s=step_s,
        low_s=drawn[edge] * costs.low,
        high_s=drawn[-1 - edge] * costs.high,
        peak_bytes=peaks,
        peak_when=when,
        parts_s=layout.parts_s(step_s) if parts else {},
        provenance=dict(costs.provenance)
        | ({"grid": layout.topology.describe()} if request.hosts > 1 else {}),
    )


def _peaks(layout: Layout, request: Request) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Bytes of each worker at its fullest, and when, which is not said of what several processes hold."""
    candidate = layout.candidate
    unsaid = ("",) * candidate.num_workers
    if layout.costs.profiles is None:
        return (0,) * candidate.num_workers, unsaid
    from gpipe_bench.pipeline.memory.grids import Sharing, grid_peak_bytes, held_stage
    from gpipe_bench.pipeline.memory.workers import Transport, pipeline_memory

    profiles = {
        remat: layout.costs.profiles(
            layout.size, split_backward=splits(candidate.schedule), tp=candidate.tp, remat=remat,
            sharded=request.gathers_half(candidate.fsdp),
        )
        for remat in dict.fromkeys(candidate.remat)
    }  # fmt: skip
    transport, rule = Transport(request.accelerated), request.optimizer
    if candidate.replicas > 1:
        share = layout.costs.gathered_share if candidate.fsdp > 1 else 1.0
        sharing = Sharing(candidate.dp, candidate.fsdp, candidate.fsdp_level or 2, gathered_share=share)
        held = [
            held_stage(
                profiles[remat].layers[span.start : span.stop],
                profiles[remat].loss if span is candidate.cut[-1] else None, sharing,
            )
            for span, remat in zip(candidate.cut, candidate.remat, strict=True)
        ]  # fmt: skip
        return grid_peak_bytes(held, layout.schedule, rule, receive_ahead=transport), unsaid
    layers = [
        layer
        for span, remat in zip(candidate.cut, candidate.remat, strict=True)
        for layer in profiles[remat].layers[span.start : span.stop]
    ]
    loss = profiles[candidate.remat[-1]].loss
    found = pipeline_memory(layers, loss, candidate.cut, layout.schedule, rule, receive_ahead=transport)
    return tuple(each.peak for each in found), tuple(each.when for each in found)
