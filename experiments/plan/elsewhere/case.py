"""A case that ranks what others measured: no device, a few seconds."""

from __future__ import annotations

from gpipe_bench.harness.experiment import Outcome
from gpipe_bench.harness.record import Quantity, Scalar

PART = "elsewhere"
SECONDS = {"zero-bubble": 2.0, "torchtitan": 1.0, "Primus": 1.0, "torchgpipe": 25.0}


def run(key: dict[str, Scalar]) -> Outcome:
    from gpipe_bench.experiments.plan.elsewhere.published import SOURCES

    orders = SOURCES[str(key["source"])]()
    quantities = [
        Quantity(
            name=name, key={"group": each.group}, value=value, unit="ratio", provenance="modelled",
            note=each.source,
        )
        for each in orders
        for name, value in (("rank correlation", each.correlation), ("regret", each.regret))
    ]  # fmt: skip
    details = {
        "orders": [
            {
                "group": each.group,
                "source": each.source,
                "names": list(each.names),
                "speeds": list(each.speeds),
                "predicted": list(each.predicted),
                "correlation": each.correlation,
                "regret": each.regret,
            }
            for each in orders
        ]
    }
    return Outcome(tuple(quantities), details)
