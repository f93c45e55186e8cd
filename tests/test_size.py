"""`size`: the search and the cut for one's own accelerators, and its refusals."""

from __future__ import annotations

import json

import pytest

from gpipe_bench.experiments.commands.cli import main


def size(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    status = main(["size", *map(str, arguments)])
    out, err = capsys.readouterr()
    return status, out, err


def peaks(line: str) -> list[int]:
    found = json.loads(line)
    names = ("when", "peak")
    return [
        sum(value for name, value in each.items() if name not in names and isinstance(value, int))
        for each in found.get("workers") or found["stages"]
    ]


def test_the_largest_model_fits_and_one_layer_more_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("transformer-lm", "--num-stages", 4, "--cap-gib", 24, "--json")
    status, out, _ = size(capsys, *asked)
    found = json.loads(out)
    assert status == 0
    assert max(peaks(out)) <= 24 * 2**30
    assert sum(found["layers_per_stage"]) == found["num_layers"] + 2
    given = (*asked, "--optimizer", "rmsprop", "--num-layers")
    counted = max(peaks(size(capsys, *given, found["num_layers"], "--cap-gib", 25)[1]))
    assert 0 < counted - max(peaks(out)) < 2**28, "the buffers of messages, which Table 1 does not count"
    status, _, err = size(capsys, *given, found["num_layers"] + 1)
    assert status == 2
    assert "there are 24 GiB" in err


def test_more_microbatches_never_need_more(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("transformer-lm", "--num-stages", 2, "--cap-gib", 900, "--num-layers", 4, "--json")
    needed = [max(peaks(size(capsys, *asked, "--num-microbatches", m)[1])) for m in (1, 4, 32)]
    assert needed[0] > needed[1] > needed[2]
    assert json.loads(size(capsys, *asked)[1])["num_microbatches"] == 1, "the fewest that fit"


def test_the_table_names_the_model_and_every_stage(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = size(capsys, "transformer-lm", "--num-stages", 3, "--cap-gib", 16, "--num-layers", 3)
    assert "transformer-lm: 282,178,816 parameters under gpipe on 3 x 16 GiB (modelled)" in out
    assert [line.split()[0] for line in out.splitlines()[-3:]] == ["0", "1", "2"]


def test_what_each_worker_holds_under_any_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("transformer-lm", "--num-stages", 2, "--cap-gib", 99, "--num-layers", 6, "--json")
    asked = (*asked, "--num-microbatches", 8)

    def workers(name: str, remat: str) -> list[dict[str, int]]:
        status, out, _ = size(capsys, *asked, "--schedule", name, "--remat", remat)
        assert status == 0
        return list(json.loads(out)["workers"])

    v = workers("zb-v", "never")
    assert [worker["stages"] for worker in v] == [[0, 3], [1, 2]]
    assert sum(worker["parameters"] for worker in v) == sum(w["parameters"] for w in workers("1f1b", "never"))
    for name in ("gpipe", "zb-v", "interleaved"):
        fuller, leaner = (max(w["peak"] for w in workers(name, remat)) for remat in ("never", "always"))
        assert leaner < fuller
    _, out, _ = size(capsys, *[each for each in asked if each != "--json"], "--schedule", "zb-v")
    assert "parameters under zb-v on 2 x 99 GiB (modelled)" in out
    assert out.splitlines()[-1].split()[:3] == ["1", "1", "2"]


def test_compiled_layers_keep_something_else(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("transformer-lm", "--num-stages", 1, "--cap-gib", 99, "--num-layers", 3)
    asked = (*asked, "--num-microbatches", 16)
    eager, compiled = (
        json.loads(size(capsys, *asked, *more, "--json")[1])["workers"][0] for more in ((), ("--compiled",))
    )
    assert compiled["parameters"] == eager["parameters"]
    assert compiled["activations"] != eager["activations"]
    _, out, _ = size(capsys, *asked, "--compiled")
    assert "every one recomputed, layers compiled" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("vgg --num-stages 1 --cap-gib 1", "unknown model 'vgg'; known: amoebanet-d, transformer-lm"),
        ("transformer-lm --num-stages 1 --cap-gib 1", "no transformer-lm fits into 1 GiB"),
        ("transformer-lm --num-stages 40 --cap-gib 24 --num-layers 24", "use at most 26"),
        ("transformer-lm --num-stages 0 --cap-gib 24", "--accelerators 0: give 1 or more"),
        ("transformer-lm --num-stages 1 --cap-gib nan", "--memory-gib nan: give the GiB"),
        ("transformer-lm --num-stages 1 --cap-gib 9 --num-layers 0", "--num-layers 0: give 1 or more"),
        (
            "transformer-lm --num-stages 1 --cap-gib 9 --num-layers 3 --num-filters 2",
            "--num-filters 2 is AmoebaNet's; leave it out",
        ),
        (
            "transformer-lm --num-stages 1 --cap-gib 9 --num-layers 3 --num-microbatches 5",
            "use one of 1, 2, 4",
        ),
        ("amoebanet-d --num-stages 1 --cap-gib 9 --num-layers 3", "needs --num-filters"),
        (
            "amoebanet-d --num-stages 1 --cap-gib 9 --num-filters 208",
            "--num-filters 208 needs --num-layers L",
        ),
        ("transformer-lm --num-stages 2 --cap-gib 9 --schedule zb-v", "--schedule zb-v needs --num-layers L"),
        ("transformer-lm --num-stages 2 --cap-gib 9 --remat always", "--remat always needs --num-layers L"),
        (
            "transformer-lm --num-stages 2 --cap-gib 9 --schedule zb-v --num-layers 4 --num-microbatches 7",
            "--num-microbatches 7 does not divide",
        ),
        (
            "transformer-lm --num-stages 2 --cap-gib 1 --schedule zb-v --num-layers 4 --num-microbatches 8",
            "transformer-lm does not fit: the smallest peak is ",
        ),
    ],
)
def test_refusals_name_the_value_and_the_remedy(
    capsys: pytest.CaptureFixture[str], arguments: str, message: str
) -> None:
    status, out, err = size(capsys, *arguments.split())
    assert status == 2
    assert message in err
    assert err.startswith("error: ")
    assert (out, len(err.splitlines())) == ("", 1)
