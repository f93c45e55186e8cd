"""The cuts into stages that the paper may have made, and what each makes of steps that were measured here.

Steps are timed with stages cut by the measured seconds of the layers. The paper cut before it ran, by a cost
of a layer that it does not give and by a rule that it names, so what it cut by is an unknown like any other
(`partition_cost` and `partition_rule` of results/unknowns.toml). The cuts of the paper's own sizes are on
record, and so are the measured seconds of every layer here: a stage of another cut takes the share of all
work that its layers have. Numbers are moved by what that changes and not made anew, so the seconds of whole
steps stay those that were measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gpipe_bench.experiments.timed.replay import TimedActions
from gpipe_bench.harness.experiment import Case
from gpipe_bench.harness.record import Record, find
from gpipe_bench.pipeline.plan.partition import Partition

PART = "cuts"
ESTIMATE_S = 8.0
SETTINGS = "partition_cost", "partition_rule"
MISSING = (
    "The cuts that the paper may have made are not on record, and a cut by measured seconds is none of them; "
    "the case part=cuts adds them."
)


def cases(models: Sequence[str]) -> list[Case]:
    """One for each model, by shape alone: nothing is timed."""
    return [Case({"part": PART, "model": model}, ESTIMATE_S) for model in models]


@dataclass(frozen=True, eq=False)
class Cuts:
    """Of one model: by setting and number of stages the layers of each stage; by layer the parameters, and
    the bytes of one example over a cut behind it.

    The first setting is the middle, as the rule of the predictions has it for a list of words.
    """

    stages: Mapping[str, Mapping[int, Partition]]
    parameters: Sequence[int]
    sent_bytes: Sequence[int]
    returned_bytes: Sequence[int]

    @classmethod
    def of(cls, records: Sequence[Record], model: str) -> Cuts | None:
        """Those on record; None where there are none."""
        record = find(records, "done", part=PART, model=model)
        if record is None:
            return None
        known: Mapping[str, Any] = record.details
        whole = (range(len(known["parameters"])),)
        stages = {
            setting: {1: whole} | {int(k): tuple(range(*span) for span in cut) for k, cut in by_count.items()}
            for setting, by_count in known["cuts"].items()
        }
        return cls(stages, known["parameters"], known["sent_bytes"], known["returned_bytes"])

    def recut(
        self, timed: TimedActions, stages: Partition, layers_s: Sequence[float], examples: int
    ) -> TimedActions:
        """The same work in other stages.

        Every kind of action is divided as the seconds of the layers are, the update as the parameters.

        Args:
            timed: the actions of one configuration, as they were measured
            stages: the layers of each stage
            layers_s: measured seconds of each layer on a micro-batch, in any unit
            examples: of a micro-batch
        """
        shares = _shares(layers_s, stages)
        medians = timed.medians_s()
        totals = {
            kind: sum(seconds for (_, of), seconds in medians.items() if of == kind) for _, kind in medians
        }
        ends = [span.stop - 1 for span in stages[:-1]]
        return replace(
            timed,
            partition=stages,
            samples_s={
                (stage, kind): (share * total,)
                for stage, share in enumerate(shares)
                for kind, total in totals.items()
            },
            update_s=tuple(sum(timed.update_s) * share for share in _shares(self.parameters, stages)),
            activation_bytes=tuple(examples * self.sent_bytes[end] for end in ends),
            gradient_bytes=tuple(examples * self.returned_bytes[end] for end in ends),
        )

    def factors(
        self, record: Record, names: Sequence[str], of: Callable[[TimedActions, Mapping[str, Any]], float]
    ) -> dict[str, tuple[float, ...]]:
        """By setting, what its cut multiplies a number of each named configuration by.

        `of` gives the number from the actions of a configuration and its facts. A setting whose rule leaves a
        stage without layers in any of the configurations is none that the paper can have had.
        """
        found = {}
        for setting, by_count in self.stages.items():
            every = [record.details["cells"][name] for name in names]
            if any(facts["num_stages"] not in by_count for facts in every):
                continue
            moved = []
            for facts in every:
                timed = TimedActions.from_data(facts["actions"])
                examples = facts["batch_size"] // facts["num_microbatches"]
                layers_s = record.details["layers_ms"][str(examples)]
                other, own = (
                    of(self.recut(timed, stages, layers_s, examples), facts)
                    for stages in (by_count[facts["num_stages"]], timed.partition)
                )
                moved.append(other / own)
            found[setting] = tuple(moved)
        return found


def _shares(of_layers: Sequence[float], stages: Partition) -> list[float]:
    total = sum(of_layers)
    return [sum(of_layers[layer] for layer in span) / total for span in stages]
