"""What v1 says about Figure 3, held against ours: an almost linear speed-up, and a quarter more time for
recomputation.
"""

from __future__ import annotations

from collections.abc import Sequence

from gpipe_bench.experiments.measuring.tables.replay_error import next_error
from gpipe_bench.experiments.measuring.tables.sentences import TABLE, computed, quotient, sentence, word
from gpipe_bench.experiments.measuring.tables.step_text import SMOKE, published
from gpipe_bench.harness.record import Quantity, Record, find
from gpipe_bench.harness.verdict import Entry, about, at_least

ACCELERATORS = 4.0  # of pipeline-8 over those of naive-2


def sentences(records: Sequence[Record]) -> list[Entry]:
    """An entry for each sentence that the records suffice for."""
    found: list[Entry] = []
    amoebanet = find(records, "done", model="amoebanet")
    if amoebanet is not None:
        share = quotient(
            "share of a linear speed-up",
            _of(amoebanet, "pipeline-8"),
            _of(amoebanet, "naive-2"),
            ACCELERATORS,
        )
        found += sentence(
            "AmoebaNet-D (4, 512): share of a linear speed-up", "pipeline-8 over naive-2", share,
            next_error(records, str(amoebanet.case["model"])), allowed=at_least(word("near_linear_share")),
            record=amoebanet, note="throughput with 8 stages over naive-2's, over four",
            not_comparable=SMOKE if amoebanet.profile == "smoke" else "",
        )  # fmt: skip
    resnet = find(records, "done", model="resnet101")
    row, column = "extra time by recomputation", "pipeline-1 / naive-1, ResNet-101"
    cell = published(TABLE)["paper", row, column]
    if resnet is not None:
        one, naive = _of(resnet, "pipeline-1"), _of(resnet, "naive-1")
        ratio = quotient("naive-1 / pipeline-1", naive, one)
        samples = () if ratio is None else ratio.samples or (ratio.value,)
        extra = computed(
            "extra time", [100 * (each - 1) for each in samples if each is not None], "%", "replayed"
        )
        found += sentence(
            row, column, extra, next_error(records, str(resnet.case["model"])),
            allowed=about(cell, word("about")), record=resnet,
            note="seconds of a step with re-materialization over those without, less one",
            not_comparable=SMOKE if resnet.profile == "smoke" else "",
        )  # fmt: skip
    return found


def _of(record: Record, configuration: str) -> Quantity | None:
    """Throughput over the base's of the configuration as it is laid out for the figure."""
    for label, facts in record.details["cells"].items():
        if label == configuration:
            return record.quantity("normalised throughput", **facts["key"])
    return None
