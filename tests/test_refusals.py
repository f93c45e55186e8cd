"""What refused calls say: `refusals.txt` holds the wording, call by call, and no other test needs to.

    python -m tests.test_refusals       writes what they say now; the diff is what changed for users

A call stands at the beginning of a line and may use the public names of the packages and those below. It is
made in an empty folder. What it raises stands under it. Sections say what is called.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import gzip
import hashlib
import json
import math
import re
import shlex
import struct
import sys
import tempfile
import zipfile
from collections import UserDict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

sys.path.append(str(Path(__file__).parent))  # for what is not run by pytest
import command_line
from own_graphs import Residual, UNet
from records import quantity, record
from tiny_models import mlp, mlp_batch, seeded

from gpipe_bench import models, pipeline, planner
from gpipe_bench.experiments.consistency import judging as consistency
from gpipe_bench.experiments.consistency.tasks import own_images
from gpipe_bench.experiments.directions import protocol as directions
from gpipe_bench.experiments.engines.setup import Setup, resolve
from gpipe_bench.experiments.paper_profiles import Label, Relabel
from gpipe_bench.experiments.plan.rules import found, rank_correlation, regret
from gpipe_bench.experiments.timed.claims import prediction_interval
from gpipe_bench.harness.bundle import pack
from gpipe_bench.harness.hypotheses import load_claims
from gpipe_bench.harness.paper import COLUMNS, load_paper
from gpipe_bench.harness.record import encode, from_samples, median_interval
from gpipe_bench.harness.rounds import against_itself, ratios
from gpipe_bench.harness.store import Store
from gpipe_bench.harness.units import convert, parse_printed
from gpipe_bench.harness.unknowns import load_unknowns
from gpipe_bench.harness.verdict import Allowed, Spread
from gpipe_bench.models.amoebanet.modules import DropPath, SamePool2d
from gpipe_bench.models.transformer.blocks import to_cut
from gpipe_bench.pipeline.arguments import worker_of
from gpipe_bench.pipeline.memory.grids import Sharing, held_stage
from gpipe_bench.pipeline.plan.edges import Edge
from gpipe_bench.pipeline.plan.links import Bucket, Copy, Gather, Offload
from gpipe_bench.pipeline.plan.named import seq1f1b
from gpipe_bench.pipeline.plan.remat import from_text
from gpipe_bench.pipeline.plan.schedule import recomputed
from gpipe_bench.planner.breakdown import breakdown
from gpipe_bench.planner.collectives import all_gather_s, all_reduce_s, fetched, pass_s
from gpipe_bench.planner.costs import SizeCosts
from gpipe_bench.planner.cuts import best_cut
from gpipe_bench.planner.recompute import Held
from gpipe_bench.planner.request import check
from gpipe_bench.planner.steps import LayerTimes, QuickSteps

PAGE = Path(__file__).with_name("refusals.txt")
SMALL = {
    "amoebanet-d": {"num_layers": 3, "num_filters": 8},
    "resnet101": {"num_filters": 8, "num_classes": 3, "image_size": 32},
    "transformer-lm": {"vocab_size": 11, "d_model": 8, "ffn_dim": 12, "num_heads": 2, "seq_len": 6},
}
SMALL["attnres"] = SMALL["transformer-lm"]
SMALL["transformer-seq2seq"] = {**SMALL["transformer-lm"], "head_dim": 3}


def rows(*lines: str, remat: Any = "never", **changes: Any) -> pipeline.Schedule:
    """A schedule of the actions of each worker."""
    schedule = pipeline.from_csv("\n".join(line.replace(" ", ",") for line in lines), remat=remat)
    return dataclasses.replace(schedule, **changes)


def built(name: str, **options: Any) -> nn.Module:
    """A model, on the meta device."""
    with torch.device("meta"):
        return models.MODELS[name](**{**SMALL[name], **options})


def auto(**options: Any) -> pipeline.Pipeline:
    """Four layers on as many stages."""
    layers = [nn.Linear(1, 1) for _ in range(4)]
    options = {"num_stages": 4, "num_microbatches": 4, "schedule": "auto", "remat": "never", **options}
    return pipeline.Pipeline(layers, **options)


def pipe(**arguments: Any) -> pipeline.Pipeline:
    """Eight layers on two stages, but for these arguments."""
    given = {"num_stages": 2, "num_microbatches": 4, **arguments}
    return pipeline.Pipeline(**{"layers": seeded(mlp), **given})


OUT, IN = Copy(0, 0, False, 1), Copy(0, 0, True, 2)


def copied(*copies: Any) -> None:
    """One stage whose graphs go to the host like this."""
    pipeline.replay(pipeline.named("gpipe", 1, 2), pipeline.SLOTS, offload=Offload(copies, (1.0,), 1))


NUMBER = {
    "table": "t", "row": "r", "column": "c", "value": "82000000", "printed": "82M", "unit": "parameters",
    "kind": "result", "hardware": "TPU", "source": "paper", "location": "v5 Table 1",
}  # fmt: skip


def paper(*numbers: dict[str, str], columns: Any = COLUMNS, more: str = "") -> None:
    """A file of the paper's numbers, each a plain one but for these columns."""
    with open("paper.csv", "w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerow(columns)
        for each in numbers:
            file.write(",".join({**NUMBER, **each}.get(column, "") for column in columns) + f"{more}\n")
    load_paper(Path("paper.csv"))


UNKNOWNS = """
[[unknown]]
tables = ["t"]
setting = "s"
allowed = [1, 2]
later = [9]
reason = "because"
sources = ["v1 3"]
[[stated]]
tables = ["t"]
setting = "u"
value = 3
source = "v1 3"
quote = "three"
[[hypothesis]]
name = "three of them"
tables = ["t"]
settings = { s = 9 }
"""


def unknowns(old: str, new: str) -> None:
    """A file of settings that are not stated, with one text replaced."""
    assert UNKNOWNS.count(old) == 1
    for name, text in (("good", UNKNOWNS), ("bad", UNKNOWNS.replace(old, new))):
        Path(f"{name}.toml").write_text(text, encoding="utf-8")
        load_unknowns(Path(f"{name}.toml"))


def protocol(old: str, new: str, of: Any = consistency) -> None:
    """The protocol of an experiment with one text replaced."""
    text = of.PATH.read_text(encoding="utf-8")
    assert text.count(old) == 1, old
    Path("protocol.toml").write_text(text.replace(old, new), encoding="utf-8")
    of.load_protocol(Path("protocol.toml"))


def joint(file: str, **claim: Any) -> None:
    """A file of one claim about several numbers."""
    lines = (f"{key} = {json.dumps(value).replace(':', ' =')}" for key, value in claim.items())
    Path("given").write_text("\n".join(["[[claim]]", *lines]), encoding="utf-8")
    load_claims(Path(file))


def data(options: str, *files: str, **contents: bytes) -> None:
    """A training on these files, empty ones or with their contents."""
    for name, content in {**dict.fromkeys(files, b""), **contents}.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(content)
    command(f"run consistency --profile smoke --device cpu --results results {options}")


def idx(
    name: str = "", shape: Any = (), content: bytes | None = None, end: str = "", held_out: int = 2
) -> None:
    """A data set in MNIST's format, of which one file has another shape or this content."""
    shapes: dict[str, Any] = {"train-images-idx3": (4, 9, 9), "train-labels-idx1": (4,)}
    shapes |= {"t10k-images-idx3": (held_out, 9, 9), "t10k-labels-idx1": (held_out,)}
    for each, given in (shapes | ({name: shape} if shape else {})).items():
        made = bytes((0, 0, 8, len(given))) + struct.pack(f">{len(given)}I", *given) + bytes(math.prod(given))
        made = gzip.compress(made) if end else made
        Path(f"{each}-ubyte{end}").write_bytes(made if each != name or content is None else content)
    own_images(".", 9, False, 0, None)


class RefusedError(Exception):
    """What `check` says of a file that is not taken in."""


def sent(
    *, archive: bytes | None = None, edit: Any = None, name: str = "", number: str = "", **changes: Any
) -> None:
    """A file of two records with these changes, as `export` writes it; then edited by its files (without a
    name its comment), with a file more, with another number in a line whose digest fits, or replaced.
    """
    plain: dict[str, Any] = {"experiment": "computed", "environment": SURROUNDINGS, "duration_s": 12.0}
    one, other = (encode(each) + b"\n" for each in (record(1, **{**plain, **changes}), record(2, **plain)))
    path = Path("it.zip")
    path.write_bytes(pack({"computed": one + other}))
    if number:
        body = re.sub(rb',"digest":"[0-9a-f]{16}"\}\n', b"}", one)
        body = body.replace(b'"value":1.5', b'"value":' + number.encode())
        one = body[:-1] + b',"digest":"' + hashlib.sha256(body).hexdigest()[:16].encode() + b'"}\n'
    with zipfile.ZipFile(path) as whole:
        files = {each: whole.read(each) for each in whole.namelist()} | {"": whole.comment}
    files |= edit(files) if edit else {"computed.jsonl": one + other}
    files |= {name: b"x"} if name else {}
    with zipfile.ZipFile(path, "w") as changed:
        changed.comment = files.pop("")
        for each, text in files.items():
            changed.writestr(each, text)
    if archive is not None:
        path.write_bytes(archive)
    status, out, err = command_line.call("check", path)
    if (status, err) == (1, ""):
        line, last = out.splitlines()
        assert last == "check: it.zip: not to be taken in"
        raise RefusedError(line)


SURROUNDINGS = {
    "cpu_model": "a processor",
    "python": "3.12",
    "versions": {"torch": "2.13"},
    "code_sha256": "0",
}
OFF = quantity(1.2, name="control", unit="ratio", low=1.1, high=1.3)


class BadUsageError(Exception):
    """One line behind the word `error`, nothing else, and status 2."""


def command(line: str) -> None:
    """One of the command line; the fake experiment is one of those that there are."""
    status, out, err = command_line.call(*shlex.split(line))
    if (status, out, err.count("\n")) == (2, "", 1) and err.startswith("error: "):
        raise BadUsageError(err.removeprefix("error: "))


def size(line: str) -> None:
    command(
        f"size {line} --accelerators 1 --memory-gib 9" if "--accelerators" not in line else f"size {line}"
    )


def planned(line: str) -> None:
    """Of a small model."""
    model = "planning_models:tied --memory-gib 2.5 --batch-size 8 --optimizer sgd"
    command(f"plan {model} --device-type a10 --link pcie {line}")


def given(line: str, content: str | bytes) -> None:
    """A command about the file `given`."""
    Path("given").write_bytes(content if isinstance(content, bytes) else content.encode())
    command(line)


def held(cap: float, *, at_rest: tuple[int, int] = (10, 20), graphs: int = 5) -> None:
    """Two stages of 1F1B, two micro-batches; each action holds the graph that it makes or uses up."""
    inputs, schedule = (2, 1) if graphs else (0, 0), pipeline.one_f_one_b(2, 2)

    def own(action: pipeline.Action, again: bool) -> float:
        mine = inputs[action.stage] if action.kind is pipeline.Kind.F and again else graphs
        return at_rest[action.stage] + mine

    lay_out = partial(pipeline.replay, action_s=pipeline.SLOTS)
    planner.adaptive(schedule, lay_out, Held(inputs, (graphs,) * 2, own, at_rest), cap)


REQUEST = planner.Request(
    accelerators=4, memory_bytes=2**30, batch_size=16, link=pipeline.LINKS["nvlink4"]
)  # fmt: skip
CANDIDATE = planner.Candidate(
    cut=(range(0, 3), range(3, 5)), schedule="1f1b", num_microbatches=4, remat=("always", "never"),
    num_workers=2, dp=2, fsdp=2, fsdp_level=3,
)  # fmt: skip
PREDICTION = planner.Prediction(
    candidate=CANDIDATE, batch_size=64, step_s=2.0, low_s=1.0, high_s=4.0, peak_bytes=(5, 7),
    peak_when=("0B0", "1B0"), parts_s={"computation": 2.0},
)  # fmt: skip

EXAMPLE = pipeline.Boundary.of(torch.empty(2, 4))
PROFILED = pipeline.Profiler().model(
    [nn.Linear(4, 4) for _ in range(2)], nn.functional.mse_loss, EXAMPLE, EXAMPLE
)
RESERVED = Residual()
RESERVED.stages = nn.Linear(1, 1)

SETUP = Setup([nn.Linear(4, 4)] * 2, (range(1), range(1, 2)), 4, "never", torch.device("cpu"))

NAMES = {
    "resolve": resolve, "joint": joint, "directions": partial(protocol, of=directions),
    "load_paper": load_paper, "load_unknowns": load_unknowns, "SETUP": SETUP,
    **{each.__name__: each for each in (pipe, copied, Copy, Offload, Sharing, held_stage, worker_of)},
    **{each.__name__: each for each in (seq1f1b, recomputed, fetched, pass_s, from_samples, median_interval)},
    **{each.__name__: each for each in (against_itself, ratios, prediction_interval, Spread, Allowed)},
    **{each.__name__: each for each in (convert, regret, rank_correlation, found, Label, Relabel, UNet)},
    **{each.__name__: each for each in (mlp_batch, nn.functional.mse_loss, DataLoader, UserDict)},
    "OUT": OUT, "IN": IN, "TWO": SimpleNamespace(size=2, rank=0), "NORM": nn.BatchNorm1d(6), "nn": nn,
    "torch": torch, "PROFILED": PROFILED, "SPANS": [range(1), range(1, 2)], "RESERVED": RESERVED,
    **{name: getattr(planner, name) for name in planner.__all__},
    **{each.__name__: each for each in (paper, unknowns, protocol, data, idx, sent, command, size, held)},
    "planned": planned, "given": given,
    **{each.__name__: each for each in (quantity, record, Store, Bucket, Gather, breakdown, best_cut, check)},
    **{each.__name__: each for each in (all_gather_s, all_reduce_s, SizeCosts, LayerTimes, QuickSteps)},
    "parse_printed": parse_printed, "gzip": gzip, "OFF": OFF, "Path": Path, "REQUEST": REQUEST,
    "CANDIDATE": CANDIDATE, "PREDICTION": PREDICTION,
    **{name: getattr(pipeline, name) for name in pipeline.__all__},
    **{name: getattr(models, name) for name in models.__all__},
    **{each.__name__: each for each in (rows, built, auto, from_text, to_cut, DropPath, SamePool2d, Edge)},
    "changed": dataclasses.replace, "nan": float("nan"), "F": pipeline.Kind.F, "B": pipeline.Kind.B,
    "I": pipeline.Kind.I, "skip": Edge(0, 0, 3, ("a",)),
}  # fmt: skip


def sections() -> dict[str, dict[str, str]]:
    """What each call of each section is to say."""
    found: dict[str, dict[str, str]] = {}
    calls, call = dict[str, str](), ""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            calls = found.setdefault(line.strip("[]"), {})
        elif line.startswith("    "):
            calls[call] += f"\n{line.strip()}" if calls[call] else line.strip()
        elif line and not line.startswith("#"):
            call = line
            calls[call] = ""
    return found


def said(call: str) -> str:
    """By a call."""
    try:
        own_path = mock.patch.object(sys, "path", sys.path.copy())
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), own_path:
            eval(call, dict(NAMES))
    except Exception as error:
        text = f"{type(error).__name__}: {error}".replace(f"{folder}/", "").replace(folder, "its folder")
        lines = (line.strip() for line in text.splitlines())
        return "\n".join(line for line in lines if line)
    return "nothing"


@pytest.mark.parametrize("section", sections())
def test_what_is_refused_says_what_is_wrong_and_what_would_do(section: str) -> None:
    wanted = sections()[section]
    assert "nothing" not in wanted.values()
    assert {call: said(call) for call in wanted} == wanted


def main() -> None:
    text = PAGE.read_text(encoding="utf-8")
    parts = [line for line in text.partition("[")[0].splitlines() if line]
    for section, calls in sections().items():
        parts.append(f"\n[{section}]")
        for call in calls:
            parts += [call, *(f"    {line}" for line in said(call).splitlines())]
    PAGE.write_text("\n".join(parts) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
