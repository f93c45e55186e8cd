"""What Table 2 shows below the comparison: its text and its figures, from records alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from gpipe_bench.experiments.paper import on_gpus
from gpipe_bench.experiments.paper.timed import claims, layers
from gpipe_bench.experiments.report.drawing import gantt_plot, picture
from gpipe_bench.harness.experiment import Plot
from gpipe_bench.harness.record import Record, frame, of_case
from gpipe_bench.harness.report.grid import numbers_text
from gpipe_bench.pipeline.plan.named import gpipe
from gpipe_bench.pipeline.plan.partition import RULES, partition
from gpipe_bench.pipeline.plan.simulate import SLOTS, replay
from gpipe_bench.planner.breakdown import even_stages

if TYPE_CHECKING:
    from matplotlib.figure import Figure


TABLES = {"amoebanet": "table2-amoebanet", "transformer": "table2-transformer"}
BATCHES = {
    "fixed": "(a) the same mini-batch in all cells: only K and M differ",
    "fitted": "(b) the largest mini-batch under a memory cap in every cell, as the paper did",
}
SHARED_CORES = "on shared cores"


def of_models(records: Sequence[Record], batch: str) -> dict[str, Record]:
    return claims.by_model(records, TABLES, batch=batch)


def places_of(model: str, record: Record) -> dict[str, tuple[str, str, str]]:
    """Where each configuration on record stands in the paper, in the order of the table."""
    known = sorted((each["num_stages"], each["num_microbatches"]) for each in facts_of(record))
    return {f"K={k} M={m}": (TABLES[model], f"M={m}", f"K={k}") for k, m in known}


def facts_of(record: Record) -> list[dict[str, Any]]:
    return list(record.details["cells"].values())


# Text


def tables(records: Sequence[Record]) -> str:
    """Fixed and fitted mini-batch apart, then how far to believe them: what the replay errs by, and what a
    step loses to the rule that cuts the layers.
    """
    parts = [
        claims.throughput_text(record, _title(record, batch), places_of(model, record), batch_sizes=True)
        for batch in BATCHES
        for model, record in of_models(records, batch).items()
    ]
    parts += [on_gpus.text(records, TABLES), layers.text(records)]
    parts += [claims.replay_errors(records), shared_cores(records), partition_rules(records)]
    return "\n\n".join(part for part in parts if part)


def _title(record: Record, batch: str) -> str:
    details, link = record.details, record.details["link"]
    scale = f"; scaled to this machine: {details['scale']}" if details["scale"] else ""
    return (
        f"{details['title']} {BATCHES[batch]}\n"
        f"  normalised throughput, K=2 M=1 is 1; engine {details['engine']}{scale}\n"
        f"  replayed: actions timed in {details['processes']} process(es), laid out on K devices over "
        f"{link['name']} ({link['bandwidth_bytes_per_s'] / 1e9:.1f} GB/s); measured: run on K devices\n"
        "  balance: how near to even stages; schedule: what it gives even stages; micro-batch: how efficient "
        "one of that size is"
    )


def shared_cores(records: Sequence[Record]) -> str:
    """The steps that ran for real in more processes than there are cores: memory and loss, no times."""
    lines = []
    for record in of_case(records, "done", batch=SHARED_CORES):
        found = {(each.name, *each.key.values()): each.value for each in record.metrics}
        num_stages = record.details["num_stages"]
        several, alone = found["loss", num_stages], found["loss", 1]
        for stage in range(num_stages):
            counted, modelled = found["peak", stage, "counted"], found["peak", stage, "modelled"]
            assert counted is not None
            assert modelled is not None
            loss = "equal" if several == alone else f"{several} and {alone}"
            lines.append(
                [
                    "" if stage else record.details["title"], f"{stage}",
                    f"{record.details['actions'][stage]}", f"{counted / 2**20:.2f}",
                    f"{modelled / 2**20:.2f}", f"{counted / modelled:.2f}",
                    loss if stage == num_stages - 1 else "",
                ]
            )  # fmt: skip
    title = (
        "K=4 M=4 for real, four processes that share the cores: every stage took its schedule's actions in "
        "their order\n  no time is taken; counted is more than modelled by what the transport keeps in flight"
    )
    headers = ["", "stage", "actions", "peak counted (MiB)", "modelled (MiB)", "ratio", "loss, K=4 and K=1"]
    return numbers_text(title, headers, lines)


def partition_rules(records: Sequence[Record]) -> str:
    """What a pipeline loses to its cut: the paper's rule, the library's heuristic and ours."""
    lines = []
    for record in of_models(records, "fixed").values():
        seconds = record.details["layers_ms"][min(record.details["layers_ms"], key=int)]
        most = max(facts["num_microbatches"] for facts in facts_of(record))
        for k in sorted(each["num_stages"] for each in facts_of(record) if each["num_microbatches"] == most):
            shares = bound_shares(seconds, k, most).values()
            cells = [each if isinstance(each, str) else f"{100 * each:.0f} %" for each in shares]
            lines.append([record.details["title"], f"K={k} M={most}", *cells])
    title = (
        "What the partition costs: share of the balanced bound (modelled from the measured seconds of single "
        "layers)\n  bottleneck: ours, exact; variance: the paper's rule; cumulative: the published library's "
        "heuristic"
    )
    return numbers_text(title, ["", "cell", *RULES], lines)


def bound_shares(layers_s: Sequence[float], num_stages: int, num_microbatches: int) -> dict[str, float | str]:
    """By rule: the step of perfectly even stages over the step of the rule's stages (modelled), or why the
    rule gives none. Forward : recomputation : backward = 1 : 1 : 2, a free link.
    """
    schedule = gpipe(num_stages, num_microbatches, "always")
    shares: dict[str, float | str] = {}
    for rule in RULES:
        try:
            stages = partition(layers_s, num_stages, rule)
        except ValueError as error:
            shares[rule] = str(error).partition(":")[0]
            continue
        stages_s = [sum(layers_s[i] for i in span) for span in stages]
        work = {action: SLOTS[action.kind] * stages_s[action.stage] for action in schedule}
        even_s = replay(schedule, even_stages(work, schedule).__getitem__).makespan_s
        shares[rule] = even_s / replay(schedule, work.__getitem__).makespan_s
    return shares


# Figures


CAPTIONS = {
    "fitted": "Table 2 as the paper did it, the mini-batch fitted to memory: paper beside ours, scaled down",
    "fixed": (
        "Table 2 with one mini-batch for all: M = 32 leaves single examples, which take longer each; so it "
        "falls where the paper, which adjusted the mini-batch, rises"
    ),
}
"""The main figure first."""
LOOKS: dict[str, tuple[str, Any]] = {
    "ours, replayed": ("o", ""), "ours, measured": ("s", (1, 4)), "bound: even stages": (".", (1, 1)),
    "paper (TPU)": ("X", (4, 2)),
}  # fmt: skip
"""Marker and dashes by whose the line is."""


def figures(records: Sequence[Record]) -> list[Plot]:
    """Throughput over M with bound and paper, efficiency as a map, and the steps behind them."""
    plots = [
        picture(
            name=f"table2-throughput-{batch}",
            caption=CAPTIONS[batch],
            alt=(
                "Lines over M for each K: ours, the bound of balanced stages and the paper's points, "
                "relative to K=2, M=1; every number stands in the table above."
            ),
            draw=partial(_throughput, found, batch),
        )
        for batch in CAPTIONS
        if (found := of_models(records, batch))
    ]
    if found := of_models(records, "fixed"):
        efficiency = picture(
            name="table2-efficiency",
            caption="Table 2: throughput per device as a share of what balanced stages allow",
            alt="A grid of stages by micro-batches with the efficiency of each.",
            draw=partial(_efficiency, found),
        )
        # The step of the largest K with four micro-batches, as it is laid out.
        drawn = {
            model: (f"{record.details['title']}, K={facts['num_stages']} M=4", facts["timeline"])
            for model, record in found.items()
            for facts in sorted(facts_of(record), key=lambda each: int(each["num_stages"]))
            if facts["num_microbatches"] == 4 and facts.get("timeline")
        }
        plots += [efficiency, *(gantt_plot(f"table2-step-{model}", *of) for model, of in drawn.items())]
    return plots


def _throughput(found: Mapping[str, Record], batch: str) -> Figure:
    import pandas
    import seaborn
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6 * len(found) + 0.4, 4.2), layout="constrained")
    every = figure.subplots(1, len(found), squeeze=False)[0]
    whose = {
        "normalised throughput": "ours, replayed",
        "normalised real throughput": "ours, measured",
        "normalised bound throughput": "bound: even stages",
    }
    numbers = frame(list(found.values())).query("metric in @whose")
    for place, (axes, (model, record)) in enumerate(zip(every, found.items(), strict=True)):
        ours = numbers[numbers.record == place].assign(whose=lambda lines: lines.metric.map(whose))
        known = claims.published(TABLES[model])
        papers = ours[["K", "M"]].drop_duplicates().assign(whose="paper (TPU)")
        papers["value"] = [
            cell.value if (cell := known.get(("paper", f"M={m}", f"K={k}"))) else None
            for k, m in zip(papers.K, papers.M, strict=True)
        ]
        lines = pandas.concat([ours, papers.dropna()]).astype({"K": str, "M": int, "value": float})
        lines = lines.rename(columns={"whose": ""})
        seaborn.lineplot(
            lines, x="M", y="value", hue="K", style="", palette="viridis", ax=axes,
            style_order=[name for name in LOOKS if name in set(lines[""])],
            markers={name: marker for name, (marker, _) in LOOKS.items()},
            dashes={name: dashes for name, (_, dashes) in LOOKS.items()},
        )  # fmt: skip
        counts = sorted({*lines.M})
        axes.set_xscale("log", base=2)
        axes.set_xticks(counts, [str(m) for m in counts])
        axes.set_ylim(bottom=0)
        axes.set_xlabel("micro-batches M")
        axes.set_ylabel("throughput, K = 2, M = 1 is 1")
        axes.set_title(claims.scaled(record.details), fontsize=9)
        handles, labels = axes.get_legend_handles_labels()
        axes.get_legend().remove()
    # Once, and beside the lines: within the axes it would hide some.
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=7)
    what = "the same mini-batch everywhere" if batch == "fixed" else "mini-batch fitted to memory"
    figure.suptitle(f"Table 2: throughput over micro-batches, {what}", fontsize=11)
    return figure


def _efficiency(found: Mapping[str, Record]) -> Figure:
    """Throughput over K times what one device would do: how much of the devices is used."""
    import pandas
    import seaborn
    from matplotlib.figure import Figure

    from gpipe_bench.experiments.paper.timed.replay import TimedActions, lay_out

    figure = Figure(figsize=(3.9 * len(found) + 0.4, 3.2), layout="constrained")
    for axes, record in zip(figure.subplots(1, len(found), squeeze=False)[0], found.values(), strict=True):
        rows = [
            {
                "stages K": facts["num_stages"],
                "micro-batches M": facts["num_microbatches"],
                "busy": 100 * (1 - lay_out(TimedActions.from_data(facts["actions"])).bubble),
            }
            for facts in facts_of(record)
            if "actions" in facts
        ]
        shares = pandas.DataFrame(rows).pivot(index="stages K", columns="micro-batches M", values="busy")
        seaborn.heatmap(shares, ax=axes, vmin=0, vmax=100, annot=True, fmt=".0f", cmap="viridis", cbar=False)
        axes.set_title(record.details["title"], fontsize=9)
    figure.suptitle("Share of the device time that is filled (%), replayed, fixed mini-batch", fontsize=10)
    return figure
