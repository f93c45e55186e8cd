"""`plan` on the command line: what it prints and refuses, bytes alone, and that what it prints runs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import NO_TORCH, ROOT, call
from forked import torchrun

from gpipe_bench.experiments.commands import plan as verb
from gpipe_bench.experiments.commands.cli import main
from gpipe_bench.models import MODELS, SHAPES, example_batch, loss_fn
from gpipe_bench.pipeline import LINKS, Boundary, Profiler, Transport, gpipe, pipeline_memory
from gpipe_bench.planner import Candidate, Request
from gpipe_bench.planner import model as size_models
from gpipe_bench.planner.candidate import Grid
from gpipe_bench.planner.formats import written
from gpipe_bench.planner.model import built

OWN = (
    "plan planning_models:tied --memory-gib 2.5 --batch-size 8 --optimizer sgd --device-type a10 --link pcie"
)
ASKED = OWN.split()


def plan(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    status = main([*ASKED, *map(str, arguments)])
    out, err = capsys.readouterr()
    return status, out, err


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path, str]:
    """A plan for two workers: as JSON, the folder with what was written, and as text."""
    folder = tmp_path_factory.mktemp("plan")
    options = [
        "--accelerators", "2", "--pp", "2", "--schedule", "1f1b", "--schedule", "zb-v",
        "--num-microbatches", "4",
        "--script", str(folder / "run_plan.py"),
    ]  # fmt: skip
    status, found, err = call(*ASKED, *options, "--full", "--json")
    assert status == 0, err
    return json.loads(found), folder, call(*ASKED, *options)[1].rstrip("\n")


def test_every_number_has_its_range_and_where_it_comes_from(two: tuple[dict[str, Any], Path, str]) -> None:
    found = two[0]
    best, *others = found["plans"]
    assert [each["step_s"] for each in found["plans"]] == sorted(each["step_s"] for each in found["plans"])
    for each in found["plans"]:
        assert each["low_s"] < each["step_s"] < each["high_s"]
        assert 0 < max(each["peak_bytes"]) <= 2**30
        assert sum(each["parts_s"].values()) == pytest.approx(each["step_s"])
        layers = each["provenance"]["layers"]
        assert "a roofline of A10 at 62.1% of its peak, 77.6% at best; flash attention, each" in layers
        assert each["examples_per_s"] == pytest.approx(8 / each["step_s"])
        assert sum(each["cut"]) == 8
    assert best["slower"] == 0
    assert {each["schedule"] for each in found["plans"]} == {"1f1b", "zb-v"}
    assert others[0]["slower"] == pytest.approx(others[0]["step_s"] / best["step_s"] - 1)
    assert found["num_parameters"] == 40 * 16 + 6 * (16 * 16 + 16), "the tied matrix counts once"


def test_the_text_has_the_best_the_cut_the_schedule_and_the_script(
    two: tuple[dict[str, Any], Path, str],
) -> None:
    found, folder, text = two
    assert "tied, 2,272 parameters, float32, sgd, mini-batch 8, on 2 x a10, 2.5 GiB each, 1.5" in text
    assert re.search(r"^pp 2, (1f1b|zb-v x 2), 4 micro-batches, recomputing nothing: ", text, re.MULTILINE)
    assert re.search(r"^0 +0( 3)? +0-\d", text, re.MULTILINE)
    assert "its schedule in slots" not in text
    assert max(map(len, text.splitlines()[:-1])) <= verb.WIDTH
    assert text.rstrip().endswith(f"run_plan.py trains by this plan; start it with\n\n{found['command']}")
    assert found["command"] == f"torchrun --nproc-per-node 2 {folder / 'run_plan.py'}"
    assert (folder / "run_plan.py").read_text() == found["script"]
    assert found["script"] not in text


@pytest.mark.processes
def test_layers_are_timed_on_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    options = "--memory-gib 1 --batch-size 4 --pp 2 --schedule 1f1b --num-microbatches 2 --optimizer sgd"
    assert main(f"plan planning_models:plain --accelerators 2 {options} --json".split()) == 0
    found = json.loads(capsys.readouterr().out)
    (best,) = found["plans"]
    assert found["device_type"] == "measured"
    assert best["provenance"]["layers"].startswith("measured, ")
    assert best["provenance"]["processes"].endswith((" timed", "that are asked about"))
    assert 0 < best["low_s"] <= best["step_s"] <= best["high_s"]
    assert sum(best["cut"]) == 6


@pytest.mark.processes
def test_the_printed_command_runs(two: tuple[dict[str, Any], Path, str]) -> None:
    folder, line = two[1], two[0]["command"].split()
    assert line[:3] == ["torchrun", "--nproc-per-node", "2"]
    said, _ = torchrun(Path(line[3]), line[4:], 2, folder, STEPS="2")
    assert re.findall(r"^step \d: loss [\d.]+$", said, re.MULTILINE) != []


def run_script(text: str, folder: Path) -> list[float]:
    """The losses that a script prints over two processes."""
    (folder / "train.py").write_text(text, encoding="utf-8")
    said, _ = torchrun(folder / "train.py", [], 2, folder, STEPS="2")
    return [float(loss) for loss in re.findall(r"^step \d: loss ([\d.]+)$", said, re.MULTILINE)]


TWO = Request(accelerators=2, memory_bytes=2**30, batch_size=4, link=LINKS["loopback"])
SMALL = {"num_layers": 2, "d_model": 16, "ffn_dim": 32, "num_heads": 4, "vocab_size": 32, "seq_len": 8}


@pytest.mark.processes
@pytest.mark.parametrize("dimension", ["tp", "dp"])
def test_the_script_of_a_plan_without_a_pipeline_runs(tmp_path: Path, dimension: str) -> None:
    """What is tensor parallel is divided by the script itself, and learns what the whole model learns."""
    model = built("small", "llama", SMALL, 4)
    request = replace(TWO, optimizer="sgd")
    candidate = Candidate(
        grid=Grid(1, **{dimension: 2}), schedule="1f1b", stages_per_worker=1, num_microbatches=2,
        microbatch_size=2 if dimension == "tp" else 1, cut=(range(4),), remat=("never",),
    )  # fmt: skip
    losses = run_script(written("script", model, candidate, request).text, tmp_path)
    torch.manual_seed(0)
    layers = MODELS["llama"](**SMALL)
    optimizer = torch.optim.SGD(layers.parameters(), lr=1e-3)
    batch, target = example_batch("llama", 4 if dimension == "tp" else 2, **SMALL)
    wanted = []
    for _ in range(2):
        loss = loss_fn("llama", **SMALL)(layers(batch), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        wanted.append(loss.item())
    assert losses == pytest.approx(wanted, abs=2e-6)


def test_a_typing_error_needs_no_torch() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", NO_TORCH, *ASKED, "--accelerators", "2", "--device-type", "h1000"],
        cwd=ROOT, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert ran.returncode == 2
    assert "unknown accelerator 'h1000'" in ran.stderr


def size(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    status = main(["plan", "--bytes", *map(str, arguments)])
    out, err = capsys.readouterr()
    return status, out, err


def peaks(found: dict[str, Any]) -> list[int]:
    """Of workers."""
    return [worker["peak"] for worker in found["workers"]]


def test_the_stages_of_a_shape_are_the_memory_models(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = size(
        capsys, "gpt2", "--accelerators", 2, "--memory-gib", 99, "--num-layers", 3, "--num-microbatches", 4,
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
    wanted = pipeline_memory(layers, loss, cut, gpipe(2, 4, "always"), "adam", receive_ahead=Transport())
    assert peaks(found) == [each.peak for each in wanted]
    assert found["num_parameters"] == sum(p.numel() for p in tied.parameters()), "the tie counts once"


def test_the_largest_of_all_is_profiled_by_one_of_its_blocks(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = size(
        capsys, "llama-405b", "--accelerators", 128, "--memory-gib", 99, "--num-microbatches", 32, "--json"
    )
    found = json.loads(out)
    assert found["num_parameters"] == 405_853_388_800
    assert found["layers_per_stage"] == [1] * 128
    assert len({json.dumps({**each, "when": "", "stages": []}) for each in found["workers"][1:-1]}) == 1
    model = size_models.model_of("llama-405b")
    profile = model.profile_of(1, "float32")
    assert len({id(layer) for layer in profile.layers}) == 3, "embedding, block, output"


def test_the_fewest_microbatches_that_fit(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("gpt2", "--accelerators", 2, "--num-layers", 2, "--batch-size", 4, "--json")
    needed = {}
    for count in (1, 2, 4):
        out = size(capsys, *asked, "--memory-gib", 99, "--num-microbatches", count)[1]
        needed[count] = max(peaks(json.loads(out)))
    assert needed[1] > needed[2] > needed[4]
    for count in (1, 2, 4):
        out = size(capsys, *asked, "--memory-gib", needed[count] / 2**30)[1]
        assert json.loads(out)["num_microbatches"] == count


def test_what_does_not_fit_says_where_and_what_would_do(capsys: pytest.CaptureFixture[str]) -> None:
    given = {"--accelerators": "1", "--num-layers": "6", "--batch-size": "4", "--memory-gib": "4.5",
             "--num-microbatches": "1", "--remat": "never"}  # fmt: skip

    def asked(options: dict[str, str]) -> tuple[int, str, str]:
        return size(capsys, "gpt2", *(each for pair in options.items() for each in pair))

    status, out, err = asked(given)
    assert (status, out, len(err.splitlines())) == (2, "", 1)
    assert "gpt2 does not fit: the smallest peak is " in err
    assert "GiB, on stage 0 (layers 0-7) at " in err
    assert "with pp 1, gpipe, 1 micro-batch and nothing recomputed; there are 4.5 GiB" in err
    options = err.strip().split("What would do: ")[1].split(", or ")
    assert options[-1].startswith("--memory-gib ")
    assert len(options) >= 2, err
    for option in options:  # each does, in the place of what was given
        if option == "no --num-microbatches":
            found = {name: value for name, value in given.items() if name != "--num-microbatches"}
        else:
            name, value = option.split()
            found = {**given, name: value}
        assert asked(found)[0] == 0, option


OWN_MODELS = """
import torch
from torch import nn

def small():
    return nn.Sequential(*(nn.Linear(256, 256) for _ in range(4))), torch.empty(8, 256)

def whole():
    layers, inputs = small()
    return layers, inputs, torch.empty(8, 256), nn.functional.mse_loss
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_size_models.py").write_text(textwrap.dedent(OWN_MODELS), encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("own")
def test_ones_own_model_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("--accelerators", 2, "--memory-gib", 1, "--num-microbatches", 4, "--optimizer", "sgd", "--json")
    for name in ("small", "whole"):
        status, out, _ = size(capsys, f"own_size_models:{name}", *asked)
        found = json.loads(out)
        assert (status, found["layers_per_stage"], found["batch_size"]) == (0, [2, 2], 8)
        assert found["num_parameters"] == 4 * (256 * 256 + 256)
        assert [worker["parameters"] for worker in found["workers"]] == [2 * 4 * (256 * 256 + 256)] * 2
    more = json.loads(size(capsys, "own_size_models:whole", *asked, "--batch-size", 16)[1])
    assert more["batch_size"] == 16
    assert max(peaks(more)) > max(peaks(found))
