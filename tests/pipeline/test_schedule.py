"""Schedules are data: what they contain and refuse, and how torch's runtime reads and writes them."""

from __future__ import annotations

import dataclasses
import itertools
import random
import warnings
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_schedules import random_placement, random_remat, random_schedule
from torch import distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as of_torch
from torch.testing._internal.distributed.fake_pg import FakeStore

from gpipe_bench.pipeline import (
    FREE,
    NAMED,
    SLOTS,
    Action,
    Kind,
    Link,
    Schedule,
    Timeline,
    draw,
    from_csv,
    generate,
    gpipe,
    naive,
    named,
    one_f_one_b,
    replay,
    to_csv,
    validate,
)
from gpipe_bench.pipeline.plan.edges import rings_of, turns
from gpipe_bench.pipeline.plan.named import loop, vee
from gpipe_bench.pipeline.plan.schedule import REMAT_MODES, Remat, from_text, of_stages, to_text
from gpipe_bench.pipeline.plan.walk import Transfer, channels, dependencies, execution_order, transfers
from gpipe_bench.pipeline.ranks.connect import refuse_too_many
from gpipe_bench.planner.predict import breakdown


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Random rows on a random placement, or a named schedule."""
    if draw(st.booleans()):
        sizes = draw(st.tuples(st.integers(1, 4), st.integers(1, 8)))
        remat = draw(st.sampled_from(["never", "always", "except_last"]))
        return named(draw(st.sampled_from(sorted(NAMED))), *sizes, remat=remat)
    generator = random.Random(draw(st.integers(0, 2**32)))
    num_stages = generator.randint(1, 6)
    placement = random_placement(generator, num_stages)
    return random_schedule(generator, num_stages, generator.randint(1, 6), placement=placement)


def row(schedule: Schedule, stage: int) -> str:
    return " ".join(str(action) for action in schedule.actions[stage])


def test_rows_as_in_the_paper() -> None:
    """Figure 2(c) of the paper, with the recomputations written out."""
    schedule = gpipe(2, 3, remat="always")
    assert row(schedule, 0) == "0F0 0F1 0F2 0R2 0B2 0R1 0B1 0R0 0B0"
    assert row(schedule, 1) == "1F0 1F1 1F2 1R2 1B2 1R1 1B1 1R0 1B0"
    assert row(gpipe(2, 3, remat="except_last"), 1) == "1F0 1F1 1F2 1B2 1R1 1B1 1R0 1B0"
    assert row(gpipe(2, 2, remat="never"), 0) == "0F0 0F1 0B1 0B0"
    assert row(naive(2), 1) == "1F0 1B0"
    assert row(naive(2, 2, remat="always"), 0) == "0F0 0R0 0B0 0F1 0R1 0B1"
    assert row(one_f_one_b(3, 4), 0) == "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3"
    assert row(one_f_one_b(3, 4), 2) == "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3"
    assert row(one_f_one_b(3, 1), 0) == "0F0 0B0"
    by_stage = gpipe(3, 3, remat=("always", "never", "except_last"))
    assert row(by_stage, 1) == "1F0 1F1 1F2 1B2 1B1 1B0"
    assert row(by_stage, 2) == "2F0 2F1 2F2 2B2 2R1 2B1 2R0 2B0"
    assert row(one_f_one_b(2, 3, remat=("except_last", "never")), 0) == "0F0 0F1 0R0 0B0 0F2 0R1 0B1 0B2"
    assert row(named("zb-h1", 2, 1, remat=("always", "never")), 0) == "0F0 0R0 0I0 0W0"


def test_drawing() -> None:
    assert draw(replay(gpipe(3, 3, remat=("always", "except_last", "never")), SLOTS)).splitlines() == [
        "stage 0 | F0 F1 F2 R2 .  .  .  .  .  B2 B2 R1 B1 B1 R0 B0 B0",
        "stage 1 | .  F0 F1 F2 .  .  .  B2 B2 R1 B1 B1 R0 B0 B0",
        "stage 2 | .  .  F0 F1 F2 B2 B2 B1 B1 B0 B0",
    ]
    assert draw(replay(gpipe(2, 1, remat="never"), {**SLOTS, Kind.F: 2})).splitlines() == [
        "stage 0 | F0 F0 .  .  .  .  B0 B0",
        "stage 1 | .  .  F0 F0 B0 B0",
    ]


def test_one_worker_consumes_before_it_produces_again() -> None:
    assert " ".join(map(str, execution_order(gpipe(3, 2, remat="except_last")))) == (
        "0F0 1F0 2F0 0F1 1F1 2F1 2B1 1B1 0B1 2R0 2B0 1R0 1B0 0R0 0B0"
    )


def test_text_form_of_an_action() -> None:
    assert str(Action(2, Kind.F, 0)) == "2F0"
    assert Action.parse(" 12W34 ") == Action(12, Kind.W, 34)
    assert Action.parse("0F1") < Action.parse("1F0")
    assert str(Transfer(Action.parse("0F1"), Action.parse("1F1"))) == "0F1->1F1"


# Files, and what cannot be executed


def written(*rows: str, remat: str = "never") -> Schedule:
    return from_csv("\n".join(row.replace(" ", ",") for row in rows), remat=remat)


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        ("0F0 0B0|1B0 1F0", "worker 1 stands at 1B0 and needs 1F0, which stands behind it in the same row"),
        (
            "0F0 0B0 0F1 0B1|1F0 1F1 1B0 1B1",
            "worker 1 stands at 1F1 and needs 0F1, which worker 0 takes only",
        ),
        ("0F0 0F1 0B0 0B1|1F1 1F0 1B0 1B1", "stage 0 sends 0F0 to stage 1, which waits for 0F1 first"),
        ("0F0 0B0 0F0|1F0 1B0", "stage 0 takes 0F0 more than once"),
        ("0F0 0F1 0B0 0B1|1F0 1F1 1B0", "stage 1 takes micro-batch 1 through F; .* it needs F B"),
        ("0F20000000", "no action is of micro-batch 0, but one is of micro-batch 20000000"),
        ("0F1000000000 7B0", "no action is of stage 1, but one is of stage 7"),
    ],
)
def test_what_cannot_be_executed_says_why(rows: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        validate(written(*rows.split("|")))


def test_rows_are_of_the_workers_stages_and_a_placement_has_each_stage() -> None:
    good = gpipe(2, 1, "never")
    first, second = good.actions
    with pytest.raises(ValueError, match=r"stage 0 holds 1B0, outside stage 0 or outside micro"):
        validate(dataclasses.replace(good, actions=((*first, *second[1:]), second[:1])))
    with pytest.raises(ValueError, match=r"\(0, 1, 0\) does not give each of 4 stages a worker"):
        validate(dataclasses.replace(named("interleaved", 2, 2), placement=(0, 1, 0)))


def test_a_file_that_recomputes_other_micro_batches_is_refused() -> None:
    with pytest.raises(ValueError, match=r"micro-batches 1 of 2 are recomputed; a stage recomputes all"):
        from_csv("0F0,0F1,0R1,0B1,0B0")


# What is recomputed: one choice, or one per stage


@st.composite
def remats(draw: st.DrawFn) -> tuple[Remat, int, int]:
    """A choice with its numbers of stages and micro-batches."""
    num_stages, num_microbatches = draw(st.tuples(st.integers(1, 5), st.integers(1, 7)))
    generator = random.Random(draw(st.integers(0, 10**6)))
    return random_remat(generator, num_stages), num_stages, num_microbatches


@settings(max_examples=25)
@given(remats(), st.booleans())
def test_what_is_asked_for_is_recomputed_and_written_to_files(
    of: tuple[Remat, int, int], split: bool
) -> None:
    """By named and generated schedules, the latter with times for a recomputation only where there is one."""
    remat, num_stages, num_microbatches = of
    again = of_stages(remat, num_stages, num_microbatches)
    kinds = (Kind.F, Kind.I, Kind.W) if split else (Kind.F, Kind.B)
    times = {(s, kind): 1.0 + s for s in range(num_stages) for kind in kinds}
    times |= {(s, Kind.R): 1.0 for s in range(num_stages) if again[s]}
    made = [generate(tuple(range(num_stages)), num_microbatches, times, remat=remat, split=split)]
    for name, (_, per_worker) in NAMED.items():
        per_worker = per_worker or 1
        if num_stages % per_worker == 0:
            workers = num_stages // per_worker
            made.append(named(name, workers, num_microbatches, remat=remat, stages_per_worker=per_worker))
    for schedule in made:
        validate(schedule)
        assert schedule.recomputed == again
        found = {(a.stage, a.microbatch) for a in schedule if a.kind is Kind.R}
        assert found == {(s, m) for s in range(num_stages) for m in again[s]}
        if schedule.name == "gpipe":
            read = from_csv(to_csv(schedule), "gpipe")
            assert (read.recomputed, read.actions) == (schedule.recomputed, schedule.actions)
    wanted = one_f_one_b(num_stages, num_microbatches, remat=remat)
    text = to_text(wanted.remat)
    assert one_f_one_b(num_stages, num_microbatches, remat=from_text(text)) == wanted


@pytest.mark.parametrize("remat", REMAT_MODES)
@pytest.mark.parametrize("name", NAMED)
def test_the_same_choice_for_each_stage_is_that_choice_for_all(name: str, remat: str) -> None:
    one = named(name, 2, 3, remat=remat)
    assert named(name, 2, 3, remat=[remat] * one.num_stages) == one
    assert one.remat == remat


# Several stages per worker


def test_a_schedule_knows_its_workers() -> None:
    schedule = named("zb-v", 2, 3)
    assert (schedule.num_workers, schedule.num_stages) == (2, 4)
    assert [schedule.worker(stage) for stage in range(4)] == [0, 1, 1, 0]
    assert [schedule.stages_of(worker) for worker in range(2)] == [(0, 3), (1, 2)]
    row = [action for action in schedule.actions[0] if action.stage == 3]
    assert list(schedule.row(3)) == row
    assert str(row[0]) == "3F0"
    assert schedule.in_flight(0) == 3


@given(schedules())
def test_valid_schedules_run_through(schedule: Schedule) -> None:
    """In the order of one process and in the replay alike, and what is needed comes before."""
    validate(schedule)
    order = execution_order(schedule)
    position = {action: i for i, action in enumerate(order)}
    timeline = replay(schedule, SLOTS)
    event = {e.action: e for e in timeline.events}
    assert sorted(order) == sorted(schedule) == sorted(event)
    for action, needs in dependencies(schedule).items():
        for need in needs:
            assert position[need] < position[action]
            assert event[need].end_s <= event[action].start_s
    for worker, row in enumerate(schedule.actions):
        mine = schedule.stages_of(worker)
        assert [action for action in order if action.stage in mine] == list(row)
        assert [e.action for e in timeline.of_worker(worker)] == list(row)
        assert all(a.end_s <= b.start_s for a, b in itertools.pairwise(timeline.of_worker(worker)))


@given(schedules())
def test_messages_travel_in_the_order_in_which_they_are_posted(schedule: Schedule) -> None:
    """Every message is in one channel, or stays on its worker; sends, turns and needs agree."""
    between = channels(schedule)
    travelling = [message for messages in between.values() for message in messages]
    staying = [m for m in transfers(schedule) if m not in set(travelling)]
    assert len(travelling) + len(staying) == 2 * (schedule.num_stages - 1) * schedule.num_microbatches
    for message in staying:
        assert schedule.worker(message.source.stage) == schedule.worker(message.target.stage)
    place = {action: i for row in schedule.actions for i, action in enumerate(row)}
    for (source, target, backward), messages in between.items():
        assert source != target
        assert [place[m.source] for m in messages] == sorted(place[m.source] for m in messages)
        assert [place[m.target] for m in messages] == sorted(place[m.target] for m in messages)
        assert list(turns(schedule, target, source, back=backward)) == [
            (m.target.stage, m.target.microbatch) for m in messages
        ]


@given(schedules(), st.sampled_from([FREE, Link("slow", 0.5, 3), Link("shared", 0.25, 2, True)]))
def test_a_breakdown_accounts_for_every_worker(schedule: Schedule, link: Link) -> None:
    num_bytes = [1.0] * (schedule.num_stages - 1)
    found = breakdown(schedule, SLOTS, link, activation_bytes=num_bytes, update_s=[0.5] * schedule.num_stages)
    step = found.timeline
    total = schedule.num_workers * step.makespan_s
    assert float(sum(found.seconds.values())) == pytest.approx(total)
    assert found.seconds["weight update"] == Fraction(schedule.num_stages, 2)
    assert total - float(step.idle_s) == pytest.approx(
        sum(step.busy_s(stage) for stage in range(step.num_stages))
    )
    again = Timeline.from_data(step.to_data())
    assert again == step
    assert again.placement == schedule.placement


@given(schedules())
def test_a_table_says_it_all(schedule: Schedule) -> None:
    assert from_csv(to_csv(schedule), schedule.name, schedule.remat) == schedule


def test_what_a_worker_sends_to_itself_takes_no_time_and_no_link() -> None:
    """Stages 1 and 2 are on worker 1: a message of 10 s each way to and from worker 0 alone."""
    schedule = written("0F0 3F0 3B0 0B0", "1F0 2F0 2B0 1B0")
    step = replay(schedule, {Kind.F: 1, Kind.B: 2}, Link("slow", latency_s=10), setup_s=[0, 5, 3, 0])
    assert [message.name for message in step.messages] == ["0F0->1", "2F0->3", "3B0->2", "1B0->0"]
    assert (step.makespan_s, step.work[-1].end_s) == (4 * 1 + 4 * 2 + 4 * 10, 5 + 3)  # set-ups in turn
    assert draw(replay(schedule, SLOTS)).splitlines() == [
        "worker 0 | 0F0 .   .   3F0 3B0 3B0 .   .   .   .   0B0 0B0",
        "worker 1 | .   1F0 2F0 .   .   .   2B0 2B0 1B0 1B0",
    ]


def test_any_change_of_a_row_is_refused_or_runs() -> None:
    """Two actions of a worker swapped: `validate` finds what the replay would stop at, and nothing else."""
    generator = random.Random(3)
    refused = 0
    for _ in range(150):
        schedule = named(generator.choice(sorted(NAMED)), generator.randint(2, 3), generator.randint(2, 5))
        worker = generator.randrange(schedule.num_workers)
        row = list(schedule.actions[worker])
        a = generator.randrange(len(row) - 1)
        row[a], row[a + 1] = row[a + 1], row[a]
        rows = (*schedule.actions[:worker], tuple(row), *schedule.actions[worker + 1 :])
        changed = dataclasses.replace(schedule, actions=rows)
        try:
            validate(changed)
        except ValueError:
            refused += 1
            continue
        assert len(replay(changed, SLOTS).events) == sum(map(len, rows))
    assert 10 < refused < 140


# Rings: when receives are posted


def test_one_f_one_b_posts_as_buffers_become_free() -> None:
    """The example of the module's docstring."""
    ring = rings_of(one_f_one_b(3, 5))[0, False].tight
    assert ring.num_slots == 3
    assert ring.initial == (0, 1, 2)
    assert ring.following == (3, 4, None, None, None)
    ring = rings_of(gpipe(3, 4))[0, False].tight  # every activation at once
    assert (ring.initial, ring.following) == ((0, 1, 2, 3), (None,) * 4)


@pytest.mark.parametrize(("remat", "num_slots"), [("never", 2), ("always", 1), ("except_last", 1)])
def test_gradients_have_one_buffer_where_a_recomputation_hides_the_transfer(
    remat: str, num_slots: int
) -> None:
    rings = rings_of(gpipe(3, 4, remat=remat))[1, True]
    assert rings.tight.num_slots == num_slots
    assert rings.tight.initial == (3, 2)[:num_slots]
    assert rings.small.initial == (3, 2, 1, 0)  # small ones are all posted at once
    assert rings.small.following == (None,) * 4
    assert rings.of(2**16) is rings.small, "up to 256 KiB, as docs/memory.md says"
    assert rings.of(2**16 + 1) is rings.tight
    by_stage = gpipe(5, 4, remat=("always", "never", "except_last", "never", "always"))
    assert [rings_of(by_stage)[stage, True].tight.num_slots for stage in range(4)] == [1, 2, 1, 2]


def test_more_messages_than_tags_are_refused() -> None:
    long = Schedule("long", 2**12, 2**12, "never", ((),) * 2**12)
    with pytest.raises(ValueError, match="4096 stages with 4096 micro-batches are more than"):
        refuse_too_many(long)


# Schedule files of torch's pipeline runtime, both ways, without processes

NUM_WORKERS, NUM_MICROBATCHES = 2, 4
V = ("ZBVZeroBubble", "DualPipeV")


@pytest.fixture
def world() -> Iterator[None]:
    """A process group that sends nothing: torch asks it for rank and size."""
    dist.init_process_group("fake", rank=0, world_size=NUM_WORKERS, store=FakeStore())
    yield
    dist.destroy_process_group()


def theirs(name: str) -> of_torch._PipelineScheduleRuntime:
    """torch's schedule of that name, as rank 0 has it."""
    place = vee(NUM_WORKERS) if name in V else loop(NUM_WORKERS, 2)
    stages = [
        PipelineStage(torch.nn.Linear(2, 2), stage, len(place), torch.device("cpu"))
        for stage, worker in enumerate(place)
        if worker == 0
    ]
    make = of_torch.get_schedule_class(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make(stages, NUM_MICROBATCHES, loss_fn=torch.nn.functional.mse_loss)  # type: ignore[call-arg, return-value]


def dumped(name: str, path: Path, form: str = "compute_only") -> Schedule:
    theirs(name)._dump_csv(str(path), format=form)  # type: ignore[arg-type]
    found = from_csv(path.read_text(), name)
    validate(found)
    return found


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("Interleaved1F1B", "interleaved"), ("ZBVZeroBubble", "zb-v"), ("DualPipeV", "dualpipe-v"),
        ("LoopedBFS", "breadth-first"), ("InterleavedZeroBubble", None),
    ],
)  # fmt: skip
def test_torchs_files_are_read_as_the_schedules_of_that_name(
    name: str, ours: str | None, tmp_path: Path
) -> None:
    found = dumped(name, tmp_path / "torch.csv")
    assert (found.num_workers, found.num_microbatches) == (NUM_WORKERS, NUM_MICROBATCHES)
    assert found.placement == (vee(NUM_WORKERS) if name in V else loop(NUM_WORKERS, 2))
    # With the messages and all else that torch adds to it, it says the same.
    assert dumped(name, tmp_path / "lowered.csv", "compute_comms").placement == found.placement
    if ours is not None:
        assert found.actions == named(ours, NUM_WORKERS, NUM_MICROBATCHES).actions


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("ours", [name for name in NAMED if NAMED[name].stages_per_worker != 1])
def test_our_files_are_read_by_torch(ours: str, tmp_path: Path) -> None:
    """Its runtime finds the same rows, and messages for all of them."""
    schedule = named(ours, NUM_WORKERS, NUM_MICROBATCHES)
    path = tmp_path / "ours.csv"
    path.write_text(to_csv(schedule))
    name = "ZBVZeroBubble" if schedule.placement == vee(NUM_WORKERS) else "Interleaved1F1B"
    runtime = theirs(name)
    runtime._load_csv(str(path), format="compute_only")
    rows = {rank: [str(action) for action in row] for rank, row in runtime.pipeline_order.items()}
    assert rows == {worker: [str(action) for action in row] for worker, row in enumerate(schedule.actions)}
    lowered = [str(action) for row in runtime.pipeline_order_with_comms.values() for action in row]
    assert sum("SEND_F" in action for action in lowered) == sum("RECV_F" in action for action in lowered) > 0


def test_cells_that_torch_may_write() -> None:
    text = "0F0,,(0F1;0B0)OVERLAP_F_B, 0B1 ,0SEND_F1,1RECV_B0,0UNSHARD,0RESHARD,0REDUCE_GRAD,0WAIT_RECV_F1"
    assert from_csv(text).actions == (tuple(map(Action.parse, ("0F0", "0F1", "0B0", "0B1"))),)
    for wrong in ("0F0xyz", "(0F0;0B0)", "(0F0,0B0)OVERLAP_F_B", "0SEND_F", "SEND_F0", "()OVERLAP_F_B"):
        with pytest.raises(ValueError, match="is not an action"):
            from_csv(f'0F1,"{wrong}",0B1')
