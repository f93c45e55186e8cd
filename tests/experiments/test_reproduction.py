"""The declared configuration, what it computes, and every verdict on the reference records."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from records import ran
from torch.utils.flop_counter import FlopCounterMode

from gpipe_bench.experiments.paper import computed, reproduction
from gpipe_bench.experiments.paper.full_size import FullSize, num_bytes, product_flops, tiled_elements
from gpipe_bench.experiments.paper.predictions import EXPERIMENT, Run, amoebanet_memory, runs
from gpipe_bench.experiments.paper.profiles import operations, unet_memory
from gpipe_bench.experiments.paper.reproduction import Declared
from gpipe_bench.experiments.registry import load
from gpipe_bench.harness import REFERENCE
from gpipe_bench.harness.compare import compare, judge
from gpipe_bench.harness.experiment import RunOptions
from gpipe_bench.harness.paper import PaperNumber
from gpipe_bench.harness.record import REPRODUCTION, Metric, of_case
from gpipe_bench.harness.report import reproduced
from gpipe_bench.harness.reproduction import (
    Published,
    load_reproduction,
    load_unknowns,
    of_quotient,
    predictor_errors,
)
from gpipe_bench.harness.store import Store
from gpipe_bench.harness.verdict import Result, Spread
from gpipe_bench.models import MODELS, example_batch, loss_fn
from gpipe_bench.models.paper import COLUMNS, HALVES
from gpipe_bench.pipeline import Boundary, Kind, Link, Profiler, gpipe, pipeline_memory
from gpipe_bench.planner.accelerators import TPU_V2, Accelerator

RECORDS = REFERENCE / "cpu-2-cores"
TABLES = ("table1-amoebanet", "table1-transformer", "table2-amoebanet", "table2-transformer",
          "table3-amoebanet", "table3-transformer", "figure3-amoebanet", "figure3-resnet101")  # fmt: skip


@pytest.mark.parametrize("table", TABLES)
def test_whatever_the_paper_leaves_open_of_a_table_is_declared(table: str) -> None:
    assert set(load_unknowns().of(table)) <= set(load_reproduction().of(table))
    with pytest.raises(ValueError, match="has no choice of"):
        Declared(table)["colour"]


def test_a_setting_has_one_choice(tmp_path) -> None:
    path = tmp_path / "reproduction.toml"
    text = (REFERENCE.parent / "reproduction.toml").read_text()
    start = text.index("\n[[choice]]")
    first = text[start : text.index("\n\n", start)]
    path.write_text(text.replace(first, f"{first}\n{first}", 1))
    with pytest.raises(ValueError, match="two choices of num_classes"):
        load_reproduction(path)


def test_what_was_declared_afterwards_decides_nothing() -> None:
    late = [each for each in load_reproduction().choice if each.declared == "afterwards"]
    assert [(each.tables, each.setting) for each in late] == [(("control-stride",), "moved_stride")]
    found = reproduced.answers(Store(RECORDS).load("computed").records)
    assert found
    for cell in compare(found, whole=()):
        assert (cell.answer, "moved_stride declared when" in cell.reason) == ("no test", True)
    assert not load_reproduction().declared_afterwards({"table2-amoebanet"})


def test_the_error_counts_models_and_not_their_numbers() -> None:
    numbers = [Published("a", "speeds", math.exp(each), 1.0) for each in (0.3, -0.3, 0.3)]
    found = predictor_errors([*numbers, Published("b", "speeds", math.exp(0.4), 1.0)])["speeds"]
    assert math.log1p(found.error) == pytest.approx(math.sqrt((0.3**2 + 0.4**2) / 2))
    assert found.without == pytest.approx({"a": math.expm1(0.4), "b": math.expm1(0.3)})
    assert math.log1p(of_quotient(found.error)) == pytest.approx(0.5)
    assert math.log1p(of_quotient(0.1, 4)) == pytest.approx(2 * math.log1p(0.1))
    with pytest.raises(ValueError, match="not positive"):
        predictor_errors([Published("a", "bytes", 0.0, 1.0)])


def test_a_quotient_less_one_and_a_quotient_of_shares_have_errors_of_their_own() -> None:
    """A third more time is 4 / 3, and 7.6 % of that are 30 % of a third, which allow no test."""
    known = reproduced.errors()["ratios of speeds"].error
    assert reproduced.error_of("claims-text", reproduced.EXTRA, 100 / 3) == pytest.approx(4 * known)
    assert reproduced.error_of("claims-text", reproduced.NEXT, 0.7) == pytest.approx(of_quotient(known))
    records = of_case(Store(RECORDS).load("figure3").records, "done", part=REPRODUCTION)
    cells = compare(reproduced.answers(records), whole=())
    (extra,) = [each for each in cells if each.row == reproduced.EXTRA]
    assert extra.answer == "no test"
    quotient = 1 + extra.ours / 100
    assert (1 + extra.range_low / 100, 1 + extra.range_high / 100) == pytest.approx(
        (quotient / (1 + known), quotient * (1 + known))
    )


def judged(row, column, printed, ours, error, why=""):
    """A number of the paper beside a computed one with its error."""
    place = {"table": "t", "row": row, "column": column}
    number = PaperNumber(
        value=float(printed), printed=printed, unit="ratio", kind="result", source="paper", **place
    )
    spread = None if ours is None else Spread(low=ours / (1 + error), high=ours * (1 + error))
    metric = Metric("x", ours, "ratio", "modelled")
    return judge(number, Result(metric=metric, spread=spread, error=error, not_comparable=why, **place))


@pytest.mark.parametrize(
    ("ours", "error", "why", "said"),
    [
        (1.0, 0.1, "", "agrees"), (1.15, 0.1, "", "agrees"), (1.16, 0.1, "", "differs"),
        (0.86, 0.1, "", "differs"), (0.87, 0.1, "", "agrees"), (1.0, 0.26, "", "no test"),
        (None, 0.1, "nothing fits", "no test"), (1.0, 0.1, "nothing fits", "no test"),
    ],
)  # fmt: skip
def test_a_number_agrees_within_its_error_and_the_rounding(ours, error, why, said) -> None:
    assert judged("M=1", "K=2", "1.0", ours, error, why).answer == said


def test_a_table_has_four_numbers() -> None:
    """By hand: a 2 x 2 table with one pair along each side the wrong way round, and a corner that is 1."""
    corner = judged("M=1", "K=2", "1.0", 1.0, 0.1)
    others = [
        judged("M=1", "K=10", "2.0", 2.2, 0.1),
        judged("M=4", "K=2", "3.0", 6.0, 0.1),
        judged("M=4", "K=10", "4.0", 3.0, 0.1),
    ]
    found = reproduced.summed(others, [corner])
    assert found.counts == {"agrees": 1, "differs": 2}
    assert found.off == pytest.approx(0.25)
    assert found.rank == pytest.approx(0.5)
    assert (found.directions, found.pairs) == (3, 4)


@pytest.mark.parametrize("name", reproduced.SECONDS)
def test_every_table_is_computed_and_judged_by_the_errors_on_record(name: str) -> None:
    experiment = load(name)
    keys = [case.key for case in experiment.cases(RunOptions())]
    records = of_case(Store(RECORDS).load(name).records, "done", part=REPRODUCTION)
    assert {each.case["model"] for each in records} == set(reproduced.SECONDS[name])
    assert all({"part": REPRODUCTION, "model": model} in keys for model in reproduced.SECONDS[name])
    for cells, _ in reproduced.cells(records).values():
        for cell in cells:
            error = cell.entry.error
            known = reproduced.errors()["ratios of speeds" if error < 0.25 else "bytes"].error
            share = cell.ours / 100 if name == "table4" else 0.0
            assert error in (known * (1 - share), of_quotient(known), 0.0)
            assert error or cell.row == reproduced.COUNTED
    assert experiment.reproduction(compare(reproduced.answers(records))).startswith(
        ("table", "figure", "breakdown", "claims", "control")
    )


def test_a_table_computed_now_is_the_one_on_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of Table 1 the models on one accelerator: the cuts of the others take half a minute."""
    monkeypatch.setattr(reproduction, "COLUMNS", {"transformer": COLUMNS["transformer"][:2]})
    monkeypatch.setattr(reproduction, "CLAIMS", ())
    case = {"part": REPRODUCTION, "model": "transformer"}
    for name, count in (("table1", 4), ("table3", 3)):
        (record,) = of_case(Store(RECORDS).load(name).records, **case)
        kept = {str(each.key): each.value for each in record.metrics}
        again = {str(each.key): each.value for each in ran(load(name), case).metrics}
        assert again == pytest.approx({key: kept[key] for key in again})
        assert len(again) == count
    known = Store(RECORDS).load("predictions").records
    (memory,) = of_case(known, part="activations", column="pipeline-1")
    assert amoebanet_memory(runs("activations")[0]) / 2**30 == pytest.approx(memory.metrics[0].value)


def test_a_transformer_of_table_1_is_cut_by_all_its_products() -> None:
    """Fused attention's would be left out: 8 % of a layer's. AmoebaNet's can be counted as well."""
    half = HALVES["transformer"]
    assert load_reproduction().of(half.table)["attention"].value == "written out"
    full = FullSize(half.model, {**half.options, "num_layers": 3, "attention": "explicit"})
    assert [*operations("transformer", 3, 0, auxiliary_head=False)] == full.flops(2)
    assert all(operations("amoebanet", 18, 16, auxiliary_head=False))


def test_each_cell_of_table_2_says_its_width_and_mini_batch() -> None:
    (record,) = of_case(Store(RECORDS).load("table2").records, part=REPRODUCTION, model="transformer")
    said = {(each.key["row"], each.key["column"]): each.note for each in record.metrics}
    for at, batch in ((("M=1", "K=2"), 2), (("M=4", "K=8"), 32)):
        assert said[at] == f"computed with width 1024, mini-batch {batch}"
    text = reproduced.text(compare(reproduced.answers([record]), whole=()))
    assert "- M=1, K=2: computed with width 1024, mini-batch 2\n" in text


TRANSFORMER = {
    "num_layers": 3, "d_model": 64, "ffn_dim": 256, "num_heads": 2, "seq_len": 16, "vocab_size": 100,
    "attention": "explicit",
}  # fmt: skip
AMOEBANET = {"num_layers": 6, "num_filters": 16, "image_size": 64, "num_classes": 10, "aux_head": False}


# Counts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "options", "examples"),
    [("transformer-lm", TRANSFORMER, 5), ("amoebanet-d", AMOEBANET, 4), ("resnet101", {"image_size": 64}, 4)],
)
def test_operations_and_memory_scaled_from_one_prime_number_of_examples_are_those_of_any(
    model, options, examples
) -> None:
    full = FullSize(model, options)
    with torch.device("meta"):
        modules = MODELS[model](**options)
    inputs, target = example_batch(model, examples, device="meta", **options)
    with FlopCounterMode(display=False) as forward:
        output = modules(inputs)
    assert sum(full.flops(examples)) == forward.get_total_flops()
    with FlopCounterMode(display=False) as backward:
        loss_fn(model, **options)(output, target).backward()
    assert backward.get_total_flops() == sum(
        product_flops(each, examples)
        for layer in full.layers
        for operation in layer.backward
        for each in operation.products
    )
    assert sum(full.parameters) == sum(p.numel() for p in modules.parameters())
    layers, loss = Profiler(None).model(
        modules, loss_fn(model, **options), Boundary.of(inputs), Boundary.of(target)
    )
    assert [full.sent_bytes(n, examples, "float32") for n in range(len(layers) - 1)] == [
        layer.outputs.num_bytes for layer in layers[:-1]
    ]
    cut, schedule = (range(2), range(2, len(modules))), gpipe(2, 3, "always")
    wanted, *scaled = (
        [stage.peak for stage in pipeline_memory(each, of_loss, cut, schedule, receive_ahead=1)]
        for each, of_loss in ((layers, loss), (full.profiles("float32", examples)[:-1], loss))
    )
    assert scaled == [wanted]


def test_tiles_pad_both_lengths_in_the_direction_that_pads_less() -> None:
    assert tiled_elements((5, 3, 200), "sequences") == 5 * 8 * 256
    assert tiled_elements((200, 3, 5, 5), "images") == 5 * 5 * 256 * 8


def test_an_operation_takes_the_longer_of_arithmetic_and_memory_and_fused_ones_nothing() -> None:
    full = FullSize("transformer-lm", TRANSFORMER)
    arithmetic = Accelerator(name="counts", flops_per_s=1.0, half_flops_per_s=2.0, bytes_per_s=math.inf)
    half, seconds = (full.seconds(arithmetic, "float32", 2, share)[1] for share in (0.5, 1.0))
    per_token = 2 * (4 * 64 * 64 + 2 * 64 * 256) + 2 * 2 * 16 * 64
    assert full.flops(2)[1] == 2 * 16 * per_token
    assert (half.forward, seconds.forward) == (2 * 2 * 16 * per_token, 2 * 16 * per_token)
    assert seconds.backward == 2 * seconds.forward
    assert full.seconds(arithmetic, "bfloat16", 2, 1.0)[1].forward == seconds.forward / 2
    moving = replace(arithmetic, flops_per_s=math.inf, bytes_per_s=1.0)
    slow, fused = (
        full.seconds(each, "float32", 2, 1.0)[1].forward
        for each in (moving, replace(moving, fuses=True, name="fuses"))
    )
    pointwise = sum(
        num_bytes(tensor, 2, "float32")
        for each in full.layers[1].forward
        if each.is_elementwise
        for tensor in each.tensors
    )
    assert pointwise > 0
    assert slow - fused == pointwise
    with pytest.raises(ValueError, match=r"share_of_peak is 0\.0; it must be"):
        full.seconds(arithmetic, "float32", 2, 0.0)


SMALL = FullSize(
    "transformer-lm",
    {"num_layers": 10, "attention": "explicit", "d_model": 32, "ffn_dim": 128, "num_heads": 2, "seq_len": 16,
     "vocab_size": 500},
)  # fmt: skip


# Steps ------------------------------------------------------------------------------------------------------


def test_a_step_is_laid_out_with_what_its_layers_take() -> None:
    """Set-up and updates at the speed of memory, messages at that of the link, recomputation as a forward."""
    full, cut = SMALL, (range(6), range(6, 12))
    link = Link("a link", 1e-6, 1e10)
    step = full.step(TPU_V2, "float32", cut, 9, 4, share_of_peak=0.5, link=link)
    layers = full.seconds(TPU_V2, "float32", 3, 0.5)  # micro-batches of 2.25 examples hold 3
    forward = sum(layer.forward for layer in layers[:6])
    assert step.times[0, Kind.F] == step.times[0, Kind.R] == pytest.approx(forward)
    assert step.times[1, Kind.B] == pytest.approx(sum(layer.backward for layer in layers[6:]))
    assert step.beside["activation_bytes"] == [full.sent_bytes(5, 3, "float32")]
    assert step.beside["setup_s"][0] > 0 == step.beside["setup_s"][1]
    assert step.beside["update_s"][0] > 0
    assert step.makespan_s > 4 * forward
    assert sum(step.shares.values()) == pytest.approx(1)
    host = full.step(TPU_V2, "float32", cut, 9, 4, share_of_peak=0.5, link=link, setup="none")
    assert step.makespan_s - host.makespan_s == pytest.approx(step.beside["setup_s"][0])


# Others' numbers --------------------------------------------------------------------------------------------


# One convolution on each of five levels: a level down is 4 + 2 layers, up 2 + 4; one more at the end.
DOWN, BOTTOM, UP = 30, 4, 31
TINY = {"num_convs": 1, "num_filters": 4, "image_size": 64}


def peaks(*balance: int) -> list[int]:
    of = Run("memory", "", "", "", 8, 8, "except_last", balance=" ".join(map(str, balance)))
    return unet_memory(TINY, of.cut, 1, 8, "except_last")[1]


def with_every_skip_passed_on(*balance: int) -> list[int]:
    """The memory model's stages of the zoo's U-Net as it is."""
    with torch.device("meta"):
        model = MODELS["unet"](**TINY)
    inputs, target = example_batch("unet", 1, device="meta", **TINY)
    layers, loss = Profiler().model(model, loss_fn("unet", **TINY), Boundary.of(inputs), Boundary.of(target))
    ends = [sum(balance[:i]) for i in range(len(balance) + 1)]
    cut = [range(start, stop) for start, stop in pairwise(ends)]
    found = pipeline_memory(layers, loss, cut, gpipe(len(cut), 8, "except_last"), "sgd")
    return [each.peak for each in found]


def test_a_stage_between_holds_nothing_of_the_skips_that_pass_it() -> None:
    """The five skips of 8 examples, by hand: 4 channels of 64 x 64, then twice as many of half the size."""
    skips = sum((4 << i) * (64 >> i) ** 2 for i in range(5)) * 4
    direct, passed = peaks(DOWN, BOTTOM, UP), with_every_skip_passed_on(DOWN, BOTTOM, UP)
    assert passed[1] - direct[1] >= 8 * skips
    assert (direct[0], direct[2]) == (passed[0], passed[2])


def test_the_memory_of_a_published_run_is_predicted() -> None:
    kept = ran(EXPERIMENT, {"part": "memory", "column": "pipeline-1"})
    parameters, memory = compare(EXPERIMENT.cells([kept]))
    assert (parameters.ours, parameters.verdict) == (2_213_834_176, "reproduced")
    assert (memory.unit, memory.provenance, memory.source) == ("GiB", "modelled", "torchgpipe")
    # Whatever else the allocator had reserved, these it must have held: value and gradient.
    assert memory.ours > 2 * 4 * 2_213_834_176 / 2**30
    assert "unet-memory: memory, pipeline-1" in EXPERIMENT.tables([kept])


def test_others_numbers_are_judged_with_the_error_as_the_papers_are() -> None:
    found = compare(EXPERIMENT.cells(Store(RECORDS).load("predictions").records), whole=())
    known = reproduced.errors()["ratios of speeds"].error
    ratios = [each for each in found if each.unit == "ratio" and each.ours is not None]
    for each in ratios:
        assert each.answer == ("agrees" if 1 / (1 + known) <= each.ratio <= 1 + known else "differs")
    assert {each.answer for each in ratios} == {"agrees", "differs"}
    others = [each for each in found if each.unit in ("samples/s", "GiB") and each.ours is not None]
    assert {each.answer for each in others} == {"no test"}


# What the paper leaves open


def test_the_appendix_names_what_moves_a_number_and_what_stays_as_declared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The link is among what is tried; a share that is nothing somewhere is moved from there."""
    places = [("breakdown-v5", part, "share of the step") for part in ("setup", "bubble")]

    def computed(model: str, **given: Any) -> dict[reproduced.Place, float]:
        setup = 3.0 * (given["setup_place"] == "the first accelerator")
        return {places[0]: setup, places[1]: given["link_bytes_per_s"] / 1e10}

    monkeypatch.setitem(reproduction.COMPUTED, "table4", computed)
    lines = reproduction.text("table4", "resnet101").splitlines()
    (setup,), (bubble,) = ([each for each in lines if each.startswith(part)] for part in ("setup", "bubble"))
    assert setup.endswith("setup_place 0 to 3")
    assert bubble.endswith("link_bytes_per_s x2.65")
    assert "Kept as declared: memory_cap_bytes, link_latency_s" in lines[-1]
    assert "link_bytes_per_s" in reproduction.settings_of("table3", "amoebanet")


# The stride control


def test_a_moved_stride_keeps_nearly_four_times_as_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every map but those behind the place has twice the side."""
    monkeypatch.setattr(reproduction, "STRIDE_FILTERS", 16)
    monkeypatch.setattr(reproduction, "STRIDE_LAYERS", 3)
    places = ("second reduction cell", "last normal cell")
    (near, same), (far, more) = (
        reproduction.stride(
            "control-stride", image_size=67, auxiliary_head=False, moved_stride=place
        ).values()
        for place in places
    )
    assert 3 < near < far < 4.3
    assert same == 1 < more


# Sizes and small networks


def test_sizes_that_no_other_table_counts_are_held_against_the_paper() -> None:
    case = {"part": "size", "model": "transformer-seq2seq", "size": "T(6, 8192, 16)"}
    (found,) = computed.cells([ran(computed.EXPERIMENT, case)])
    assert (found.table, found.row, found.metric.value) == ("nmt-models", "T(6,8192,16)", 408_205_824)


def test_every_network_of_the_zoo_trains_the_same_and_running_statistics_are_the_mini_batchs() -> None:
    assert list(computed.NETWORKS) == list(MODELS)
    case = {"part": "trained", "table": "claims-text"}
    found = ran(computed.EXPERIMENT, case)
    networks, statistics = found.metrics
    assert networks.value == 1, networks.note
    assert (statistics.low, statistics.high) == pytest.approx((1, 1), abs=1e-12)
    answers = computed.cells([found])
    assert {answer.question for answer in answers} == {"here"}
    assert [each.verdict for each in compare(answers, whole=())] == ["identity", "identity"]
