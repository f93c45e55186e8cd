"""Figure 2's experiment: its algebra, its counting, and what it makes of records."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st
from records import record

from gpipe_bench.experiments.beyond.traffic import Shape, shape, traffic
from gpipe_bench.experiments.paper.figure2 import EXPERIMENT
from gpipe_bench.experiments.paper.figure2_schedules import VARIANTS, peak_activations, peak_bytes
from gpipe_bench.harness.compare import compare
from gpipe_bench.harness.experiment import RunOptions
from gpipe_bench.harness.record import Record
from gpipe_bench.pipeline import gpipe, one_f_one_b


def finished(**wanted: object) -> list[Record]:
    """The records of the cases that have these values, run here."""
    options = RunOptions(profile="short")
    found = []
    for case in EXPERIMENT.cases(options):
        if all(case.key.get(name) == value for name, value in wanted.items()):
            outcome = EXPERIMENT.run(case, options)
            found.append(
                record(
                    experiment="figure2",
                    case=case.key,
                    metrics=outcome.metrics,
                    details=outcome.details,
                )
            )
    assert found
    return found


@given(st.sampled_from(sorted(VARIANTS)), st.integers(1, 7), st.integers(1, 12))
def test_the_replay_equals_the_closed_form(name: str, num_stages: int, num_microbatches: int) -> None:
    variant = VARIANTS[name]
    assert variant.bubble(num_stages, num_microbatches) == variant.closed_form(num_stages, num_microbatches)


def test_what_the_first_stage_keeps() -> None:
    """Everything, one micro-batch at a time, or as many as there are stages."""
    kept = {name: variant.graphs_alive(4, 8) for name, variant in VARIANTS.items()}
    assert kept == {
        "naive": 8, "gpipe": 8, "gpipe-late": 1, "gpipe-early": 1, "gpipe-kept": 1, "1f1b": 4,
    }  # fmt: skip


@given(st.integers(1, 8), st.integers(1, 40), st.integers(1, 100))
def test_counted_activations_are_the_papers(num_stages: int, num_microbatches: int, num_layers: int) -> None:
    counted = peak_activations(gpipe(num_stages, num_microbatches, "always"), num_layers)
    assert counted == 1 + Fraction(num_layers, num_stages * num_microbatches)
    # Without re-materialization every graph is kept: the O(N L) of the text, for the stage's share of layers.
    everything = peak_activations(gpipe(num_stages, num_microbatches, "never"), num_layers)
    assert everything == 1 + Fraction(num_layers, num_stages)


def test_counted_activations_of_1f1b() -> None:
    """On the first of 4 stages 4 of 8 micro-batches are in flight, with 6 layers each."""
    assert peak_activations(one_f_one_b(4, 8, "never"), 24) == Fraction(4 * (1 + 6), 8)


def test_every_formula_of_the_paper_is_met() -> None:
    records = [*finished(part="bubble"), *finished(part="formula")]
    comparisons = compare(EXPERIMENT.cells(records), whole=("formulas",))
    verdicts = {(c.row, c.column): c.verdict for c in comparisons}
    rule = ("micro-batches per stage for a negligible bubble", "M / K")
    assert verdicts.pop(rule) == "not run", "the idle time of steps answers it"
    assert len(verdicts) == 15, "and early recomputation leaves less of the bubble"
    assert set(verdicts.values()) == {"identity"}
    for each in records[:4]:
        assert each.metric("fractions that differ from the closed form").value == 0
        assert all(pair["replay"] == pair["closed form"] for pair in each.details["fractions"].values())


# Memory -----------------------------------------------------------------------------------------------------


def test_the_memory_model_follows_the_formula() -> None:
    """What it has beyond the formula's terms is transient: the gradients on their way and temporaries."""
    totals = []
    for num_stages in (1, 4, 8):
        found = peak_bytes(24, 0, 32, num_stages, 32)
        # The fullest moment is a later backward, when the first micro-batch to come back is gone.
        assert found["formula_boundary"] * 31 / 32 <= found["boundary"] <= found["formula_boundary"]
        assert found["activations"] <= found["formula_activations"]
        formula = found["formula_boundary"] + found["formula_activations"]
        alive = found["boundary"] + found["activations"]
        total = alive + found["transients"]
        assert formula * 0.9 < total
        assert alive <= formula
        assert total < found["kept"] / 20
        totals.append(total)
    assert totals[2] < totals[1]


# Traffic ----------------------------------------------------------------------------------------------------


def test_traffic_by_hand() -> None:
    """Four layers of equal cost: with K = 2 the cut is after the second, with K = 4 after each."""
    four = Shape(
        flops=(5, 5, 5, 5), parameters=(1, 1, 1, 997),
        output_bytes=(10, 20, 30, 40), output_gradient_bytes=(10, 16, 30, 40),
    )  # fmt: skip
    two = traffic(four, 2)
    assert (two.pipeline_busiest, two.pipeline_total) == (20, 36)
    assert (two.data_parallel_each, two.data_parallel_total) == (4000, 8000)
    by_parameters = traffic(four, 2, four.parameters)  # the cut is before the last
    assert (by_parameters.pipeline_busiest, by_parameters.pipeline_total) == (30, 60)
    each = traffic(four, 4)
    assert each.pipeline_busiest == 30 + 16  # the third sends its output on, and a gradient back
    assert each.pipeline_total == 10 + 20 + 30 + 10 + 16 + 30
    assert each.data_parallel_each == 6000


def test_shapes_of_the_zoo() -> None:
    found = shape("transformer-lm", {"num_layers": 3})
    assert sum(found.parameters) == 282_178_816
    assert found.output_bytes[:4] == (1024 * 2048 * 4,) * 4  # sequence x width x float32
    assert found.output_bytes[4] == 1024 * 32_000 * 4
    assert found.output_gradient_bytes == found.output_bytes
    assert found.flops[1] == found.flops[3] > 0


def test_a_tensor_that_stands_twice_is_sent_once() -> None:
    """AmoebaNet's stem, 32 channels of 31 x 31, hands the same tensor on as both inputs of the first cell."""
    options = {"num_layers": 3, "num_filters": 16, "image_size": 64, "num_classes": 10, "aux_head": False}
    found = shape("amoebanet-d", options)
    assert found.output_bytes[0] == found.output_gradient_bytes[0] == 31 * 31 * 32 * 4


# Output -----------------------------------------------------------------------------------------------------


def test_sizes_that_no_other_table_counts_are_held_against_the_paper() -> None:
    found = {
        (cell.table, cell.row): cell.metric.value
        for cell in EXPERIMENT.cells(
            finished(part="size", model="transformer-seq2seq", size="T(6, 8192, 16)")
        )
        if cell.metric is not None
    }
    assert found == {("nmt-models", "T(6,8192,16)"): 408_205_824}
