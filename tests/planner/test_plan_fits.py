"""Tests which plans fit: the smallest peak, reserved memory, divided layers, and that remedies work."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_models import costs_of, planned

from gpipe_bench.experiments.commands.cli import main
from gpipe_bench.pipeline import LINKS, Link
from gpipe_bench.planner import Plan, Request, Space, plan
from gpipe_bench.planner.answer import as_on, smallest
from gpipe_bench.planner.model import built
from gpipe_bench.planner.request import MEASURED, ways
from gpipe_bench.planner.search import Search

WIDE = {"num_layers": 2, "d_model": 64, "num_heads": 4, "vocab_size": 50, "seq_len": 256}
NEAR = Link("near", 1e-4, 1e6)
REQUEST = Request(accelerators=4, memory_bytes=2**40, batch_size=16, link=NEAR)


def test_a_plan_fits_into_the_smallest_peak() -> None:
    """For every schedule, message buffers included; one worker has halves where nothing else is tried."""
    model, request, halves = planned("plain", 4), replace(REQUEST, batch_size=4), Space(schedules=("zb-h1",))
    few = Space(pp=(2,), schedules=("1f1b",), sharded=False)
    for space in (Space(), few, Space(schedules=("v-half",)), halves, replace(halves, pp=(1,))):
        least = smallest(model, request, space)
        assert least is not None
        found = plan(model, replace(request, memory_bytes=least.peak), space=space, costs=costs_of(model))
        assert found.best.peak <= least.peak


def test_the_smallest_peak_is_not_above_any_cut_that_the_search_finds() -> None:
    model = planned("plain")
    for name in ("gpipe", "1f1b", "interleaved", "zb-v", "v-min"):
        space = Space(schedules=(name,), pp=(2,))
        least = smallest(model, REQUEST, space)
        assert least is not None
        search = Search(costs_of(model), REQUEST, space)
        search.cap = least.peak - 1
        for way in (each for each in ways(REQUEST, space, 6) if each.microbatch_size == 1):
            found = search.best_of(way)
            assert found is None, (name, way, found.peak, least.peak)


@st.composite
def questions(draw: st.DrawFn) -> tuple[str, Request, Space]:
    """A model, machines that are about large enough for it, and what may be chosen."""
    hosts, each = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2, 3, 4]))
    request = Request(
        accelerators=hosts * each, hosts=hosts, link=NEAR, between=Link("far", 1e-3, 1e5),
        memory_bytes=draw(st.integers(6_000, 40_000)), batch_size=draw(st.sampled_from([4, 6, 8])),
        optimizer=draw(st.sampled_from(["sgd", "adam"])), cards=draw(st.sampled_from([1, 2])),
    )  # fmt: skip
    space = Space(
        schedules=draw(st.sampled_from([("gpipe", "1f1b"), ("1f1b", "zb-h1"), ("interleaved", "zb-v")])),
        pp=draw(st.sampled_from([None, (1,), (2,)])),
        microbatches=draw(st.sampled_from([None, (1,), (2,)])),
        sharded=draw(st.booleans()),
    )
    return draw(st.sampled_from(["plain", "tied"])), request, space


@settings(max_examples=6, derandomize=True)
@given(questions())
def test_an_answer_fits_and_each_remedy_of_a_refusal_is_one(case: tuple[str, Request, Space]) -> None:
    """A plan is the same when asked again, its cut holds all layers, and with more memory it is no slower."""
    name, request, space = case
    model = planned(name, request.batch_size)

    def asked(request: Request, space: Space) -> Plan:
        return plan(model, request, space=space, costs=costs_of(model, (1, 2, 3, 4, 6, 8)))

    try:
        found = asked(request, space)
    except ValueError as error:
        said = str(error)
        assert "What would do: " in said or re.search(r"\b(give|use|choose|leave) ", said), said
        for option in said.split("What would do: ")[1].split(", or ") if "What would do: " in said else ():
            changed, within = with_remedy(request, space, option)
            if option.startswith("--memory-gib"):  # its two decimals are too coarse for bytes
                changed = replace(request, memory_bytes=2**30)
            assert asked(changed, within).best.peak <= changed.memory_bytes, option
        return
    assert [*map(str, asked(request, space).predictions)] == [*map(str, found.predictions)]
    for each in found.predictions:
        assert [layer for stage in each.candidate.cut for layer in stage] == list(range(len(model.layers)))
        assert each.peak <= request.memory_bytes
        assert each.candidate.grid.accelerators <= request.accelerators
        assert each.candidate.microbatch_size >= 1
    more = asked(replace(request, memory_bytes=2 * request.memory_bytes), space)
    assert more.best.step_s <= found.best.step_s * (1 + 1e-9)


def with_remedy(request: Request, space: Space, option: str) -> tuple[Request, Space]:
    given = {"no --num-microbatches": "microbatches", "no --pp": "pp"}
    if option in given:
        return request, replace(space, **{given[option]: None})
    if option == "no --no-fsdp":
        return request, replace(space, sharded=True)
    if option == "no --schedule":
        return request, replace(space, schedules=Space.schedules)
    name, value = option.split()
    if name == "--accelerators":
        return replace(request, accelerators=int(value)), space
    if name in ("--optimizer", "--precision"):
        return replace(request, **{name[2:]: value}), space
    return request, space


def test_bytes_alone_and_a_plan_agree(capsys: pytest.CaptureFixture[str]) -> None:
    given = "gpt2 --num-layers 4 --accelerators 2 --batch-size 4 --device-type a100 --memory-gib 2"
    peaks = []
    for asked in ("--bytes", "--pp 2"):
        assert main(f"plan {given} --schedule 1f1b {asked}".split()) == 2
        error = capsys.readouterr().err
        assert "there are 2 GiB, 1.5 of them held back (--reserve-gib)" in error
        peaks.append(error.split("smallest peak is ")[1].split(" GiB")[0])
        remedy = float(error.strip().split("--memory-gib ")[1])
        assert float(peaks[-1]) + 1.5 <= remedy <= float(peaks[-1]) + 1.52
    assert float(peaks[1]) <= float(peaks[0])  # a plan recomputes everything by default


def test_bytes_alone_are_half_where_everything_is_in_bfloat16(capsys: pytest.CaptureFixture[str]) -> None:
    """They were those of float32."""
    asked = "plan gpt2 --bytes --num-layers 1 --accelerators 1 --batch-size 2 --memory-gib 9 --json"
    found = {}
    for precision in ("float32", "bf16-pure"):
        assert main(f"{asked} --precision {precision}".split()) == 0
        found[precision] = json.loads(capsys.readouterr().out)["workers"][0]["parameters"]
    assert found["float32"] == 2 * found["bf16-pure"]


def test_microbatches_that_a_model_cannot_take_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    asked = "plan planning_models:normed --accelerators 2 --memory-gib 2 --batch-size 8 --device-type a10"
    for more in ("--pp 2", "--bytes"):
        assert main(f"{asked} {more} --json".split()) == 0
        out, err = capsys.readouterr()
        found = json.loads(out)
        ways = found.get("plans", [found])
        assert all(each["num_microbatches"] < 8 for each in ways)
        assert "warning: planning_models:normed takes no micro-batches of one example" in err
        assert main(f"{asked} {more} --num-microbatches 8".split()) == 2
        assert "give fewer micro-batches" in capsys.readouterr().err


def test_a_schedule_that_nobody_gave_is_no_remedy() -> None:
    """A schedule outside `possible` is not tried, nor is leaving out `--schedule` offered."""
    model, request = planned("plain", 8), replace(REQUEST, accelerators=2, batch_size=8)
    gpipe = Space(schedules=("gpipe",), pp=(2,), microbatches=(8,), remats=("never",), sharded=False)
    least = smallest(model, request, replace(gpipe, schedules=("1f1b",)))
    assert least is not None
    request = replace(request, memory_bytes=least.peak)
    with pytest.raises(ValueError, match="does not fit.*no --schedule"):
        plan(model, request, space=gpipe, costs=costs_of(model))
    with pytest.raises(ValueError, match="does not fit") as refused:
        plan(model, request, space=replace(gpipe, possible=("gpipe",)), costs=costs_of(model))
    assert "--schedule" not in str(refused.value)


def test_a_remedy_is_a_precision_that_the_accelerator_has() -> None:
    """No bfloat16 on a V100; where layers are timed, it is in float32."""
    few = Space(schedules=("1f1b",))
    request = replace(REQUEST, accelerators=1, batch_size=8, device_type="v100", reserve_bytes=0)
    model = as_on(built("small", "gpt2", WIDE, 8), request)
    half = smallest(model, replace(request, precision="float16"), few)
    assert half is not None
    request = replace(request, memory_bytes=half.peak)
    with pytest.raises(ValueError, match="--precision float16") as refused:
        plan(model, request, space=few)
    assert "bfloat16" not in str(refused.value)
    assert plan(model, replace(request, precision="float16"), space=few).best.peak <= half.peak
    with pytest.raises(ValueError, match="does not fit") as refused:
        plan(model, replace(request, device_type=MEASURED), space=few)
    assert "--precision" not in str(refused.value)


def test_a_named_accelerator_keeps_some_back_and_this_machine_nothing() -> None:
    request = Request(accelerators=1, memory_bytes=2**34, batch_size=1, link=LINKS["free"])
    assert request.usable_bytes == 2**34
    named = replace(request, device_type="a100")
    assert named.usable_bytes == 2**34 - 3 * 2**29
    assert replace(named, reserve_bytes=2**30).usable_bytes == 2**34 - 2**30


def test_fewer_accelerators_where_sums_are_dear() -> None:
    model, dear, few = planned("plain", 4), Link("dear", 0.5, 1e2), Space(schedules=("1f1b",))
    found = plan(model, replace(REQUEST, batch_size=4, link=dear), space=few, costs=costs_of(model))
    assert found.best.candidate.grid.accelerators == 1
    assert found.command() == "torchrun --nproc-per-node 1 train.py"


def test_a_rank_of_gpt_2_holds_its_part_of_what_megatron_divides() -> None:
    model = built("small", "gpt2", {**WIDE, "d_model": 32, "seq_len": 8}, 2)
    whole, rank = (model.profile_of(2, "float32", tp=tp).layers for tp in (1, 4))
    width, float32 = 32, 4
    divided = 12 * width**2 + 7 * width  # weights, and biases of what goes into the blocks
    assert whole[1].parameter_bytes - rank[1].parameter_bytes == float32 * divided * 3 // 4
    assert rank[0].parameter_bytes == float32 * (13 + 8) * width  # words are filled up to a multiple of four
    assert model.ties_over(4)[0].num_bytes == float32 * 13 * width
    assert [layer.outputs for layer in rank[:-1]] == [layer.outputs for layer in whole[:-1]]
    with pytest.raises(ValueError, match="--tp 3: 4 heads"):
        model.check_divisible(3)


def test_more_of_anything_is_never_slower_and_a_choice_among_less_never_faster() -> None:
    model, few = planned("plain", 4), Space(schedules=("gpipe", "1f1b", "zb-v"))
    fast = replace(NEAR, bandwidth_bytes_per_s=1e8)

    def step_s(request: Request, space: Space = few) -> float:
        return plan(model, request, space=space, costs=costs_of(model)).best.step_s

    given = replace(REQUEST, accelerators=2, batch_size=4, memory_bytes=24_000)
    limit_s = step_s(given) * (1 + 1e-9)
    for more in ({"memory_bytes": 40_000}, {"link": fast}, {"accelerators": 4}):
        assert step_s(replace(given, **more)) <= limit_s, more  # type: ignore[arg-type]
    for less in ({"schedules": ("1f1b",)}, {"sharded": False}, {"pp": (1,)}, {"fewer": False}):
        assert step_s(given, replace(few, **less)) * (1 + 1e-9) >= limit_s / (1 + 1e-9), less  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("none", "returned type int; it takes no arguments and returns"),
        ("apart", r"the inputs have \[2, 3\] examples"),
        ("broken", "failed with RuntimeError: no such thing"),
        ("no_layers", "returned layers of type list of 1: return an nn.Sequential"),
        ("indivisible", "returned type int as its fifth value"),
        ("missing", "start from the module's folder"),
    ],
)
def test_what_is_no_model_is_refused_in_one_line(name: str, said: str) -> None:
    with pytest.raises(ValueError, match=said) as refused:
        planned(name)
    assert "\n" not in str(refused.value)
