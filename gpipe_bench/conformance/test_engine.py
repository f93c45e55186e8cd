"""One test for each case in each place; what is asked, and how, is in `experiments/engines/cases.py`.

All cases of a place are asked in processes of their own when its first test runs; with `--pdb` each is asked
in this process, so that the debugger stops where an engine raises.
"""

from __future__ import annotations

from typing import Any

import pytest

from gpipe_bench.experiments.engines.cases import CASES, GROUPS
from gpipe_bench.experiments.engines.checks import OK, SKIPPED
from gpipe_bench.experiments.engines.trials import PLACES, Row, examine, in_place


@pytest.fixture(scope="session")
def asked() -> dict[str, dict[str, Row]]:
    """Results so far, by place and case."""
    return {}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("case", [case.name for case in CASES])
def test_engine(asked: dict[str, dict[str, Row]], place: str, case: str, request: Any) -> None:
    config = request.config
    engine = config.getoption("--engine")
    if not engine:
        pytest.skip("name an engine: --engine module:attribute")
    group = next(index for index, group in enumerate(GROUPS) if case in {each.name for each in group})
    if config.getoption("--pdb") and PLACES[place] == 1:
        rows = {row.case: row for row in examine(engine, GROUPS[group], place, raises=True)}
    else:
        if place not in asked:
            chosen = {item.callspec.params["case"] for item in request.session.items if _is_at(item, place)}
            try:
                found = in_place(engine, place, config.getoption("--engine-timeout-s"), chosen)
            except ValueError as error:
                pytest.exit(str(error), returncode=pytest.ExitCode.USAGE_ERROR)
            asked[place] = {row.case: row for row in found}
        rows = asked[place]
    row = rows.get(case)
    if row is None:
        pytest.skip("its step can't be asked" + "".join(f": {each.text}" for each in [*rows.values()][:1]))
    if (program := config.pluginmanager.get_plugin("found")) is not None:  # that runs these tests
        program.rows.append(row)
    if row.verdict in SKIPPED:
        pytest.skip(f"{row.verdict}: {row.text}")
    if row.verdict != OK:
        more = "".join(f"\n{what}: {text}" for what, text in _said(row) if text)
        pytest.fail(f"{row.verdict}: {row.text}{more}", pytrace=False)


def _is_at(item: Any, place: str) -> bool:
    return hasattr(item, "callspec") and item.callspec.params.get("place") == place


def _said(row: Row) -> list[tuple[str, str]]:
    return [("right is", row.expected), ("in training", row.meaning), ("others have met it", row.source)]
