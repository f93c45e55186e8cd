"""`plan --bytes`: published shapes and one's own, cuts, and what would help."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from gpipe_bench.experiments.commands.cli import main
from gpipe_bench.models import MODELS, SHAPES, example_batch, loss_fn
from gpipe_bench.pipeline import Boundary, Profiler, Transport, gpipe, pipeline_memory
from gpipe_bench.planner import model as size_models


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
    assert "with pp 1, gpipe, 1 micro-batches and nothing recomputed; there are 4.5 GiB" in err
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
