"""The generated tables of the pages are the records', and what the pages show runs as it stands there."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import their_repository
import torch
from command_line import call
from torch.distributed.run import get_args_parser

from gpipe_bench.experiments.commands import report
from gpipe_bench.experiments.commands.cli import parser
from gpipe_bench.experiments.registry import spelled_out
from gpipe_bench.harness import ROOT
from gpipe_bench.models import zoo

PAGES = {
    f"{path.relative_to(ROOT)}": path.read_text(encoding="utf-8")
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("results/*.md")]
    if path.name != "CHANGELOG.md"
}
BLOCKS = [
    (page, *block) for page, text in PAGES.items() for block in re.findall(r"(?ms)^```(\w*)\n(.*?)^```", text)
]
# What is no code of ours: output, and files of other programs, of which the shell's are at least parsed.
OTHERS = {"", "mermaid", "text", "yaml", "toml", "bash", "registry", "csv"}
# One block goes on where the other ends.
CHAINED = ("docs/memory.md", "docs/running.md", "docs/schedules.md")
# Files of a user, which the tests below write, and pages with a test of their own.
FILES = ("README.md", "docs/guard.md", "docs/own-engine.md")
ELSEWHERE = {
    "docs/own-model.md": "commands/test_pages.py",
    "docs/grid.md": "commands/test_pages.py",
    "docs/plan.md": "commands/test_pages.py",
    "docs/adding-an-experiment.md": "experiments/test_adding_an_experiment.py",
}


@pytest.mark.parametrize("section", report.SECTIONS)
def test_the_tables_are_those_of_the_reference_records_and_the_experiments(section: str) -> None:
    text = report.SECTIONS[section][0].read_text(encoding="utf-8")
    assert report.rewritten(section, text) == text, (
        "stale: run python -m gpipe_bench.experiments.commands.report"
    )


# Snippets


def test_no_snippet_is_left_out() -> None:
    assert {language for _, language, _ in BLOCKS} <= OTHERS | {"python", "console"}
    with_python = {page for page, language, _ in BLOCKS if language == "python"}
    assert with_python == {*CHAINED, *FILES, *ELSEWHERE}
    assert all((ROOT / "tests" / test).exists() for test in ELSEWHERE.values())


@pytest.mark.parametrize("page", CHAINED)
def test_python_examples_run(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names: dict[str, object] = {"__name__": "page"}
    for _, _, code in (block for block in BLOCKS if block[:2] == (page, "python")):
        exec(compile(code, page, "exec"), names)  # the examples of this repository itself
    said = capsys.readouterr().out.splitlines()
    if page == "docs/memory.md":
        assert [line.partition(":")[0] for line in said[:4]] == [
            f"layers {first} to {first + 5}" for first in (0, 6, 12, 18)
        ]
        assert [line.partition(" ")[0] for line in said[4:]] == ["interleaved", "zb-v", "v-min"]


def file_of(page: str, mark: str) -> str:
    """The one snippet of a page with these words."""
    (code,) = [
        code for each, language, code in BLOCKS if (each, language) == (page, "python") and mark in code
    ]
    return code


def lines_of(page: str, *languages: str) -> Iterator[str]:
    """The commands of a page, each on a line without its comment."""
    for each, language, text in BLOCKS:
        if each == page and language in languages:
            for line in text.replace("\\\n", " ").splitlines():
                if command := line.partition("  #")[0].strip():
                    yield command


def test_the_training_of_the_readme_runs_on_two_processes(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(file_of("README.md", "start_process"))
    (line,) = [line for line in lines_of("README.md", "console") if line.startswith("torchrun ")]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *shlex.split(line)[1:]], cwd=tmp_path,
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"step \d+: loss ([\d.]+)", done.stdout)]
    assert len(losses) == 3
    assert losses[-1] < losses[1] < losses[0]


def test_the_benchmark_of_the_readme_is_guarded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = file_of("README.md", "BENCHMARKS")
    assert code == file_of("docs/guard.md", "BENCHMARKS")
    (tmp_path / "benchmarks.py").write_text(code)
    their_repository.git(tmp_path, "init", "-q", "-b", "main")
    their_repository.commit(tmp_path, "a benchmark")
    (line,) = [line for line in lines_of("README.md", "console") if line.startswith("gpipe-bench guard")]
    assert line in lines_of("docs/guard.md", "console")
    monkeypatch.chdir(tmp_path)
    status, out, err = call(*shlex.split(line)[1:], "--budget-s", "1")
    assert status == 0, err
    assert "both are the same code, so any difference is noise" in out
    assert out.splitlines()[-1].startswith("guard: ")


def test_the_engine_of_the_page_is_right_and_its_mistake_is_told_as_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = file_of("docs/own-engine.md", "class MyEngine")
    (tmp_path / "my_engine.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    status, out, err = call("check-engine", "my_engine:MyEngine")
    assert status == 0, err
    assert out.startswith("my_engine:MyEngine: 18 cases passed, 7 cannot be asked")
    assert "With `(4 * loss).backward()` in the engine above" in PAGES["docs/own-engine.md"]
    (tmp_path / "my_engine.py").write_text(code.replace("loss.backward()", "(4 * loss).backward()"))
    status, out, err = call("check-engine", "my_engine:MyEngine")
    assert status == 1, err
    (shown,) = [
        text
        for page, language, text in BLOCKS
        if (page, language) == ("docs/own-engine.md", "") and "my_engine:" in text
    ]
    assert out.startswith(shown)


# Commands

STARTS = ("torchrun ", "gpipe-bench ", "python -m ")
SHOWN = [  # of all pages: blocks, and whole commands in the text
    *(line for page in PAGES for line in lines_of(page, "console")),
    *(
        line
        for text in PAGES.values()
        for line in re.findall(r"`((?:gpipe-bench [a-z-]+ |python -m gpipe_bench)[^`]+)`", text)
        if not re.search(r"\b[A-Z]{3,}\b|\.\.\.", line)
    ),
    *(line for page in PAGES for line in lines_of(page, "") if line.startswith(STARTS)),
]
COMMANDS = [*dict.fromkeys(line.replace("python -m experiments ", "gpipe-bench ") for line in SHOWN)]
OURS = [line.partition("&& ")[2] if line.startswith("cd ") else line for line in COMMANDS]
OURS = [line.removeprefix("gpipe-bench ") for line in OURS if line.startswith("gpipe-bench ")]
# These cost nothing or little; of the others it is looked whether they are understood.
RUN = ("list", "compare", "schedule", "plan gpt2-xl --bytes", "check-engine own_", "run table1 --only")
PARSED = ("--device cuda", "--engine", "--machine ", "my_engine", "engines", "laptop.jsonl", "results/local")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all commands: what one has run is on record for the next. With the reference records."""
    folder = tmp_path_factory.mktemp("folder")
    for name in ("results", "examples"):
        (folder / name).symlink_to(ROOT / name)
    return folder


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("command", OURS)
def test_command_lines_are_understood_and_most_run(
    command: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As they stand there, but for cases of the smoke profile that cost nothing."""
    arguments = spelled_out(shlex.split(command))
    assert parser([arguments[0]]).parse_args(arguments).verb == arguments[0]
    if not command.startswith(RUN) or any(word in command for word in PARSED):
        return
    monkeypatch.chdir(folder / "examples" if command.startswith("check-engine") else folder)
    if arguments[0] == "run":
        arguments += ["--profile", "smoke", "--results", "local", "--only", "part=paper", "--jobs", "1"]
    elif arguments[0] == "compare" and "--results" not in arguments:
        # A fresh clone has the reference records alone.
        arguments += ["--results", "results/reference/cpu-2-cores"]
    elif "amoebanet-d" in arguments:  # tests/experiments/test_table1.py cuts one
        status, _, err = call(*arguments, "--accelerators", "0")
        assert (status, err.partition(":")[2].split()[:2]) == (2, ["--accelerators", "0:"])
        return
    elif "--models" in arguments:  # tests/commands/test_cli.py counts them all
        monkeypatch.setattr(zoo, "CONFIGURATIONS", zoo.CONFIGURATIONS[-1:])
    status, out, err = call(*arguments)
    assert status == 0, err
    assert out
    if command == "compare plan --full":  # what docs/plan.md says of it
        assert re.search(r"error of the step time, median .* 1\.5 %", out)
        assert re.search(r"error of the step time, worst .* 9\.7 %", out)
        assert re.search(r"regret, worst of a model .* 1\.0 %", out)
        assert "13 of 13 inside" in out


@pytest.mark.parametrize(
    "command", [line for line in COMMANDS if not line.startswith(("gpipe-", "cd ", "nox"))]
)
def test_other_programs_understand_their_commands(command: str) -> None:
    """Sessions of nox are in test_sessions.py; what pip would install, nobody installs here."""
    program, *arguments = shlex.split(command)
    if program == "torchrun":
        options = get_args_parser().parse_args(arguments)
        assert options.training_script.endswith(".py")
    elif arguments[:1] == ["-m"] and arguments[1].startswith("gpipe_bench.") and arguments[2:]:
        ended = subprocess.run(
            [sys.executable, *arguments, "--help"], cwd=ROOT, capture_output=True, timeout=300, check=False
        )
        assert ended.returncode == 0, ended.stderr


def test_scripts_for_a_shell_can_be_parsed() -> None:
    scripts = [text for _, language, text in BLOCKS if language == "bash"]
    assert scripts
    for text in scripts:
        subprocess.run(["bash", "-n"], input=text.encode(), check=True)
