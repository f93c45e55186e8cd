"""One micro-batch of a published model on an accelerator, layer by layer, ready to be laid out.

Table 3's second question is how fast a link must be for messages to stay hidden, and that ratio belongs to
the paper's hardware and to the paper's size. Here is one estimate of it, with a batch and a share of the peak
that whoever uses it names; the predictions of the paper's own numbers walk over all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gpipe_bench.experiments.published.accelerator_steps.full_size import FullSize
from gpipe_bench.experiments.timed.replay import TimedActions
from gpipe_bench.pipeline.plan.partition import partition
from gpipe_bench.pipeline.plan.schedule import Kind
from gpipe_bench.planner.accelerators import Accelerator


@dataclass(frozen=True)
class Estimate:
    """One micro-batch by layer.

    Args:
        seconds: share of the peak -> forward and backward of each layer
        output_bytes: over a cut behind each layer
        gradient_bytes: the same for the way back
        num_parameters: of all layers
    """

    seconds: Callable[[float], Sequence[tuple[float, float]]]
    output_bytes: tuple[int, ...]
    gradient_bytes: tuple[int, ...]
    num_parameters: int

    def actions(self, num_stages: int, num_microbatches: int, share_of_peak: float) -> TimedActions:
        """The actions of the best cut into stages. A recomputation takes as long as a forward; set-up and
        update are left out.
        """
        layers = self.seconds(share_of_peak)
        stages = partition([forward_s for forward_s, _ in layers], num_stages)
        ends = [stage.stop - 1 for stage in stages[:-1]]
        samples: dict[tuple[int, Kind], tuple[float, ...]] = {}
        for number, stage in enumerate(stages):
            forward_s, backward_s = (sum(layers[layer][way] for layer in stage) for way in (0, 1))
            samples |= {
                (number, Kind.F): (forward_s,),
                (number, Kind.R): (forward_s,),
                (number, Kind.B): (backward_s,),
            }
        return TimedActions(
            stages,
            num_microbatches,
            "always",
            samples,
            (),
            0.0,
            tuple(self.output_bytes[end] for end in ends),
            tuple(self.gradient_bytes[end] for end in ends),
        )


def estimate(full: FullSize, microbatch_size: int, accelerator: Accelerator) -> Estimate:
    """Counts one micro-batch of a model in float32. Nothing is allocated; equal layers are counted once."""
    work = full.work

    def seconds(share_of_peak: float) -> list[tuple[float, float]]:
        found = work.seconds(accelerator, "float32", microbatch_size, (share_of_peak,))
        return [(float(layer.forward[0]), float(layer.backward[0])) for layer in found]

    return Estimate(
        seconds,
        tuple(layer.output_bytes(microbatch_size, "float32") for layer in work.layers),
        tuple(layer.gradient_bytes(microbatch_size, "float32") for layer in work.layers),
        sum(work.parameters),
    )
