"""`size` of published shapes and of one's own models: cuts, what would help, refusals."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest
import torch

from gpipe_bench.experiments.commands.cli import main
from gpipe_bench.experiments.commands.sizing.given import Question
from gpipe_bench.experiments.planning import models as size_models
from gpipe_bench.models import MODELS, SHAPES, example_batch, loss_fn
from gpipe_bench.pipeline.memory.boundary import Boundary
from gpipe_bench.pipeline.memory.profile import Profiler
from gpipe_bench.pipeline.memory.stages.workers import pipeline_memory
from gpipe_bench.pipeline.plan.schedule import gpipe


def size(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    status = main(["size", *map(str, arguments)])
    out, err = capsys.readouterr()
    return status, out, err


def peaks(found: dict[str, list[dict[str, int]]]) -> list[int]:
    return [sum(value for name, value in stage.items() if name != "when") for stage in found["stages"]]


def test_the_stages_of_a_shape_are_the_memory_models(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = size(
        capsys, "gpt2", "--num-stages", 2, "--cap-gib", 99, "--num-layers", 3, "--num-microbatches", 4,
        "--batch-size", 8, "--json",
    )  # fmt: skip
    found = json.loads(out)
    assert (status, found["num_microbatches"], found["batch_size"], found["optimizer"]) == (0, 4, 8, "adam")
    options = {**SHAPES["gpt2"][1], "num_layers": 3}
    with torch.device("meta"):
        model = MODELS["gpt2"](**options, tied=False)
        tied = MODELS["gpt2"](**options)
    inputs, target = example_batch("gpt2", 2, device="meta", **options)
    layers, loss = Profiler().model(
        model, loss_fn("gpt2", **options), Boundary.of(inputs), Boundary.of(target)
    )
    first = found["layers_per_stage"][0]
    cut = (range(first), range(first, 5))
    wanted = pipeline_memory(layers, loss, cut, gpipe(2, 4, "always"), "adam", receive_ahead=1)
    assert peaks(found) == [each.peak for each in wanted]
    assert found["num_parameters"] == sum(p.numel() for p in tied.parameters()), "the tie counts once"


def test_the_largest_of_all_is_profiled_by_one_of_its_blocks(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = size(
        capsys, "llama-405b", "--num-stages", 128, "--cap-gib", 99, "--num-microbatches", 32, "--json"
    )
    found = json.loads(out)
    assert found["num_parameters"] == 405_853_388_800
    assert found["layers_per_stage"] == [1] * 128
    assert len({json.dumps({**each, "when": ""}) for each in found["stages"][1:-1]}) == 1
    model = size_models.model_of("llama-405b")
    profile = model.profile(32, "float32")
    assert len({id(layer) for layer in profile.layers}) == 3, "embedding, block, output"


def test_a_unet_of_a_thousand_layers_is_cut_by_what_its_layers_hold(
    capsys: pytest.CaptureFixture[str],
) -> None:
    status, out, _ = size(capsys, "unet-24-128", "--num-stages", 2, "--cap-gib", 60, "--num-microbatches", 32)
    assert status == 0
    assert "unet-24-128: 4,993,859,008 parameters on 2 x 60 GiB (modelled)" in out
    assert "every one recomputed, cut by what the layers hold" in out


def test_the_fewest_microbatches_that_fit(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("gpt2", "--num-stages", 2, "--num-layers", 2, "--batch-size", 4, "--json")
    needed = {}
    for count in (1, 2, 4):
        out = size(capsys, *asked, "--cap-gib", 99, "--num-microbatches", count)[1]
        needed[count] = max(peaks(json.loads(out)))
    assert needed[1] > needed[2] > needed[4]
    for count in (1, 2, 4):
        out = size(capsys, *asked, "--cap-gib", needed[count] / 2**30)[1]
        assert json.loads(out)["num_microbatches"] == count


def test_what_does_not_fit_says_where_and_what_would_do(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("gpt2", "--num-stages", 1, "--num-layers", 6, "--batch-size", 4)
    status, out, err = size(capsys, *asked, "--cap-gib", 1.5, "--num-microbatches", 1)
    assert (status, out, len(err.splitlines())) == (2, "", 1)
    assert "gpt2 does not fit: the smallest peak is " in err
    assert "GiB, on stage 0 (layers 0-7) at " in err
    assert "with 1 stages and 1 micro-batches; the cap is 1.5 GiB. What would do: " in err
    options = err.split("What would do: ")[1].split(", or ")
    assert options[-1].startswith("--cap-gib ")
    for option in options:  # each does, in the place of what was given
        name, value = option.split()
        given = dict(zip(("--num-stages", "--num-layers", "--batch-size", "--cap-gib", "--num-microbatches"),
                         (1, 6, 4, 1.5, 1), strict=True))  # fmt: skip
        given = {**given, name: value}
        arguments = [each for pair in given.items() for each in pair]
        assert size(capsys, "gpt2", *arguments)[0] == 0, option


def test_the_optimizers_state_is_the_one_that_was_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("--num-stages", 1, "--cap-gib", 99, "--num-layers", 2, "--num-microbatches", 1, "--json")
    for model in ("gpt2", "transformer-lm"):
        sgd, adam = (
            json.loads(size(capsys, model, *asked, "--optimizer", name)[1])["stages"][0]
            for name in ("sgd", "adam")
        )
        assert sgd["optimizer_state"] == 0
        assert adam["optimizer_state"] >= 2 * adam["parameters"]


def test_a_shape_under_another_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("gpt2", "--num-stages", 2, "--num-layers", 4, "--batch-size", 4, "--num-microbatches", 4)
    status, out, _ = size(capsys, *asked, "--cap-gib", 99, "--schedule", "zb-v", "--json")
    found = json.loads(out)
    assert status == 0
    assert [worker["stages"] for worker in found["workers"]] == [[0, 3], [1, 2]]
    status, _, err = size(capsys, *asked, "--cap-gib", 0.5, "--schedule", "1f1b")
    assert status == 2
    assert "gpt2 of this size needs " in err
    assert "on its fullest accelerator, worker " in err


def test_1f1b_is_cut_for_what_each_stage_keeps(capsys: pytest.CaptureFixture[str]) -> None:
    """Under 1F1B the first stages keep more, so an even cut needs more than the best one."""
    asked = ("gpt2", "--num-stages", 3, "--num-layers", 9, "--batch-size", 6, "--num-microbatches", 6)
    asked = (*asked, "--schedule", "1f1b", "--json")

    def fullest(cap_gib: float) -> tuple[int, list[int]]:
        status, out, err = size(capsys, *asked, "--cap-gib", cap_gib)
        assert status == 0, err
        found = json.loads(out)
        return max(worker["peak"] for worker in found["workers"]), found["layers_per_stage"]

    even, cut = fullest(99)
    lean, other = fullest((even - 1) / 2**30)
    assert lean < even
    assert other != cut
    assert sum(other) == sum(cut)


OWN = """
import torch
from torch import nn

def small():
    return nn.Sequential(*(nn.Linear(256, 256) for _ in range(4))), torch.empty(8, 256)

def whole():
    layers, inputs = small()
    return layers, inputs, torch.empty(8, 256), nn.functional.mse_loss

def none(): return 5
def apart(): return [nn.Linear(2, 2)], (torch.empty(2, 2), torch.empty(3, 2))
def broken(): raise RuntimeError("no such thing")
def no_layers(): return [1], torch.empty(2, 2)
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_size_models.py").write_text(textwrap.dedent(OWN), encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("own")
def test_ones_own_model_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("--num-stages", 2, "--cap-gib", 1, "--num-microbatches", 4, "--optimizer", "sgd", "--json")
    for name in ("small", "whole"):
        status, out, _ = size(capsys, f"own_size_models:{name}", *asked)
        found = json.loads(out)
        assert (status, found["layers_per_stage"], found["batch_size"]) == (0, [2, 2], 8)
        assert found["num_parameters"] == 4 * (256 * 256 + 256)
        assert [stage["parameters"] for stage in found["stages"]] == [2 * 4 * (256 * 256 + 256)] * 2
    model = size_models.model_of("own_size_models:whole", batch_size=16)
    assert model.batch_size == 16
    assert Question(model, 2, 4, "float32", "sgd").answer().peak > max(peaks(found))


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("own_size_models:none", "returned type int; it takes no arguments and returns (layers, inputs)"),
        ("own_size_models:apart", "the inputs have [2, 3] examples: give all of them the same"),
        ("own_size_models:broken", "failed with RuntimeError: no such thing"),
        ("own_size_models:no_layers", "returned layers of type list of 1: return an nn.Sequential"),
        ("own_size_models:absent", "has no attribute 'absent'"),
        ("no_such_module_here:f", "No module named 'no_such_module_here'; start from the folder"),
        ("own_size_models:", "is no module:function, such as my_models:small"),
        ("own_size_models:small --num-layers 3", "own_size_models:small has the layers it has"),
        ("unet-5-64 --num-layers 3", "--num-layers 3: unet-5-64 has the layers it has"),
        ("gpt2 --batch-size 0", "--batch-size 0: a mini-batch has at least 1 example"),
        ("gpt2 --num-filters 8", "--num-filters 8 is AmoebaNet's; leave it out"),
        ("gpt2 --num-layers 1 --num-microbatches 5", "use one of 1, 2, 4, 8, 16, 32"),
        ("gpt2 --num-layers 1 --remat always", "--remat always goes with --schedule"),
        ("gpt2 --num-layers 1 --schedule zb-v", "--schedule needs --num-microbatches M"),
        ("gpt2 --num-layers 0", "num_layers"),
        ("transformer-lm --batch-size 8", "--batch-size 8: transformer-lm has Table 1's mini-batch of 32"),
        ("vgg", "known: amoebanet-d, transformer-lm, gpt2"),
    ],
)  # fmt: skip
def test_refusals_name_the_value_and_the_remedy(
    capsys: pytest.CaptureFixture[str], arguments: str, message: str
) -> None:
    status, out, err = size(capsys, *arguments.split(), "--num-stages", 1, "--cap-gib", 9)
    assert status == 2
    assert message in err
    assert err.startswith("error: ")
    assert (out, len(err.splitlines())) == ("", 1)


def test_more_stages_than_layers_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    _, _, err = size(capsys, "gpt2", "--num-stages", 40, "--cap-gib", 9)
    assert "cannot cut 14 layers into 40 stages: use at most 14" in err
