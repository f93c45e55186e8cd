"""What the paper leaves open about Table 1, and what its records say of every combination: no torch.

The values come from results/unknowns.toml alone. A case computes all combinations of one half at once, in the
order of `itertools.product`, so a record keeps one list of numbers for each column and no names; the ranges,
what each setting does alone, quotients under one combination and the hypotheses are all read from these.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import product
from statistics import median

from gpipe_bench.harness.hypotheses import Hypothesis, Key, Walk
from gpipe_bench.harness.paper import load_paper
from gpipe_bench.harness.record import Quantity, Record, find
from gpipe_bench.harness.units import convert
from gpipe_bench.harness.unknowns import Unknown, Value, load_unknowns, steps_from_middle
from gpipe_bench.harness.verdict import Part, Spread
from gpipe_bench.models.paper import HALVES, Column

SHARED = (
    "activation_format", "gradient_copies", "kept_by", "tensor_layout", "boundary_tensors",
    "partition_cost", "partition_rule",
)  # fmt: skip
"""Settings of both halves."""
OWN = {"amoebanet": ("auxiliary_head", "num_classes"), "transformer": ("num_microbatches",)}
"""Settings of one half, after the shared ones."""

OWN_OF_MODEL: dict[str, tuple[str, ...]] = {"amoebanet": OWN["amoebanet"], "transformer": ()}
"""Settings of one half that change the model's parameters."""

CAP = "memory_cap_bytes"

Combination = Mapping[str, Value]


@cache
def unknown(half: str) -> Mapping[str, Unknown]:
    """The unknown settings of one half; the file is read once."""
    return load_unknowns().of(HALVES[half].table)


@cache
def allowed(half: str) -> dict[str, tuple[Value, ...]]:
    """The allowed values of each setting, by name, the shared settings first."""
    return {name: unknown(half)[name].allowed for name in (*SHARED, *OWN[half])}


@cache
def combinations(half: str) -> tuple[Combination, ...]:
    """All combinations, the last setting running fastest."""
    names = allowed(half)
    return tuple(dict(zip(names, values, strict=True)) for values in product(*names.values()))


def num_microbatches(half: str, column: Column, combination: Combination) -> int:
    """M of a column: one without a pipeline, the stated or the chosen one with it."""
    if column.is_naive:
        return 1
    return int(combination.get("num_microbatches", HALVES[half].num_microbatches))


@dataclass(frozen=True)
class Choices:
    """The combinations of a record and a number for each, by column; None where there can be none."""

    names: tuple[str, ...]
    settings: tuple[Combination, ...]
    columns: Mapping[str, tuple[float | None, ...]]

    def of(self, places: Sequence[int]) -> Choices:
        """Some of the combinations."""
        columns = {name: tuple(values[n] for n in places) for name, values in self.columns.items()}
        return Choices(self.names, tuple(self.settings[n] for n in places), columns)

    def spread(self, values: Sequence[float | None]) -> Spread | None:
        """The range of a number for each combination, over all that have one; None where none has.

        What a setting does alone is the range of the medians over all else, one for each of its values, where
        all of them were tried.
        """
        found = tuple(value for value in values if value is not None)
        if not found:
            return None
        parts = tuple(self._parts(values))
        return Spread(low=min(found), high=max(found), parts=parts, combinations=len(found), values=found)

    def _parts(self, values: Sequence[float | None]) -> Iterator[Part]:
        for name, groups in self._alike.items():
            contexts = [
                {chosen: value for chosen, n in group if (value := values[n]) is not None} for group in groups
            ]
            # Only where all of its values were tried with the same others do they tell what it does.
            most = max(map(len, contexts))
            matched = [each for each in contexts if len(each) == most]
            middles = [median(each[value] for each in matched if value in each) for value in matched[0]]
            if min(middles) < max(middles):
                yield Part(what=name, low=min(middles), high=max(middles))

    @cached_property
    def _alike(self) -> dict[str, list[list[tuple[Value, int]]]]:
        """By setting: the combinations that differ in it alone, each with its value and its place."""
        chosen = [tuple(settings[name] for name in self.names) for settings in self.settings]
        alike = {}
        for place, name in enumerate(self.names):
            groups: dict[tuple[Value, ...], list[tuple[Value, int]]] = {}
            for n, each in enumerate(chosen):
                groups.setdefault(each[:place] + each[place + 1 :], []).append((each[place], n))
            alike[name] = [*groups.values()]
        return alike

    def middle(self, values: Sequence[float | None]) -> float | None:
        """What stands for all: of the combinations with a number that of the one nearest to the middle of
        every setting, by the rule of all predictions. None where there is no number.
        """
        return next((values[n] for n in self._from_the_middle if values[n] is not None), None)

    @cached_property
    def _from_the_middle(self) -> list[int]:
        """The places of all combinations, that nearest to the middle first."""
        far = {}
        for name in self.names:
            each = list(dict.fromkeys(settings[name] for settings in self.settings))
            far[name] = dict(zip(each, steps_from_middle(each), strict=True))
        steps = [[far[name][each[name]] for name in self.names] for each in self.settings]
        return sorted(range(len(steps)), key=lambda n: (sum(steps[n]), steps[n]))

    def quotient(self, over: str, under: str) -> tuple[float | None, ...]:
        """One column over another under the same settings; None where the second is nothing."""
        return tuple(
            a / b if a is not None and b else None
            for a, b in zip(self.columns[over], self.columns[under], strict=True)
        )


def activation_choices(record: Record) -> Choices:
    """Peak activation memory in bytes, under every combination."""
    settings = _product(record.details["settings"])
    columns = {name: tuple(column["bytes"]) for name, column in record.details["columns"].items()}
    return Choices(tuple(record.details["settings"]), settings, columns)


def possible(record: Record) -> tuple[int, ...]:
    """The combinations under which the paper's own runs are possible: all its models fit into the largest
    memory there may be, but for those that fit under no combination, which tell nothing. All, where none is.
    """
    columns = [each["fits"] for each in record.details["columns"].values()]
    fitting = [each for each in columns if "1" in each]
    every = range(len(columns[0]))
    return tuple(n for n in every if all(each[n] == "1" for each in fitting)) or tuple(every)


def parameter_choices(record: Record) -> Choices:
    """Parameters of the columns' models, where settings change them."""
    details = record.details["parameters"]
    columns = {name: tuple(counts) for name, counts in details["columns"].items()}
    settings = _product(details["settings"])
    return Choices(tuple(details["settings"]), settings, columns)


def capacity_choices(record: Record) -> Choices:
    """Parameters of the largest models; 0 where nothing fits."""
    names = tuple(record.details["settings"])
    values = [record.details["settings"][name] for name in names]
    settings = tuple(
        {name: values[place][index] for place, (name, index) in enumerate(zip(names, indices, strict=True))}
        for indices in record.details["combinations"]
    )
    columns = {name: tuple(column["parameters"]) for name, column in record.details["columns"].items()}
    return Choices(names, settings, columns)


def ranged(name: str, unit: str, middle: float | None) -> Quantity:
    """A prediction; what the middle gives stands for it."""
    return Quantity(name=name, value=middle, unit=unit, provenance="modelled")


def hypothesis_record(records: Sequence[Record], half: str) -> Record | None:
    """The record of a half's activation memory under every combination."""
    return _done(find(records, part="hypotheses", half=half))


def capacity_record(records: Sequence[Record], half: str) -> Record | None:
    """The record of a half's largest models under every combination."""
    return _done(find(records, part="capacity", half=half))


def _done(record: Record | None) -> Record | None:
    return record if record is not None and record.status == "done" else None


def _product(settings: Mapping[str, Sequence[str | int | float | bool]]) -> tuple[Combination, ...]:
    return tuple(dict(zip(settings, values, strict=True)) for values in product(*settings.values()))


BASE = "the base"
ROW = "peak activation memory"


def hypotheses(records: Sequence[Record]) -> list[Hypothesis]:
    """One for each combination of the settings of the halves on record; none without records."""
    found = {half: record for half in HALVES if (record := hypothesis_record(records, half)) is not None}
    if not found:
        return []
    choices = {half: activation_choices(record) for half, record in found.items()}
    settings: dict[str, dict[Value, None]] = {}
    for each in choices.values():
        for combination in each.settings:
            for name, value in combination.items():
                settings.setdefault(name, {})[value] = None
    shared = [name for name in settings if all(name in each.names for each in choices.values())]
    order = [*shared, *(name for name in settings if name not in shared)]
    values = {half: _values(half, each) for half, each in choices.items()}
    base = {name: next(iter(settings[name])) for name in order}
    made = []
    for chosen in product(*(settings[name] for name in order)):
        combination = dict(zip(order, chosen, strict=True))
        numbers: dict[Key, float] = {}
        for half, each in choices.items():
            numbers |= values[half][tuple(combination[name] for name in each.names)]
        made.append(Hypothesis(name=_named(combination, base), values=numbers, settings=combination))
    return [*made, *_reasons(records)]


CLAIMS = (
    ("AmoebaNet: largest on 8 accelerators over naive-1", "amoebanet", "pipeline-8", "naive-1"),
    ("Transformer: largest on 128 partitions over naive-1", "transformer", "pipeline-128", "naive-1"),
    ("Transformer: larger by re-materialization alone", "transformer", "pipeline-1", "naive-1"),
    ("AmoebaNet: larger on one accelerator", "amoebanet", "pipeline-1", "naive-1"),
    ("AmoebaNet: larger from 1 to 8 accelerators", "amoebanet", "pipeline-8", "pipeline-1"),
)
"""Row, half and the two columns that are divided."""


def _reasons(records: Sequence[Record]) -> Iterator[Hypothesis]:
    """What naive-1 is where a compiler keeps less than by default (`naive`), by half and reason: its
    activations, the largest model, and how many times larger GPipe's are, under the same settings of whatever
    both leave open.
    """
    units = {cell.key: cell.unit for cell in load_paper() if cell.source == "paper"}
    for half in HALVES:
        record, table = _done(find(records, part="reasons", half=half)), HALVES[half].table
        largest = capacity_record(records, half)
        key = (table, ROW, "naive-1")
        for reason in record.details["reasons"] if record is not None else ():
            activations = [convert(value, "bytes", units[key]) for value in reason["bytes"]]
            capacity = reason["capacity"]
            naive = dict(
                zip(map(_frozen, _product(capacity["settings"])), capacity["parameters"], strict=True)
            )
            found = {key: activations, (table, "maximum parameters", "naive-1"): list(naive.values())}
            for row, of_half, over, under in CLAIMS:
                if largest is not None and (of_half, under) == (half, "naive-1"):
                    choices = capacity_choices(largest)
                    pairs = [
                        (value, naive[_frozen({name: settings[name] for name in capacity["settings"]})])
                        for settings, value in zip(choices.settings, choices.columns[over], strict=True)
                    ]
                    found["claims", row, f"{over} / {under}"] = [a / b for a, b in pairs if a and b]
            yield Hypothesis(
                name=f"{table}: {reason['name']}",
                values={key: activations[0]},
                settings={"reason": reason["name"]},
                after_looking=True,
                spreads={
                    cell: Spread(
                        low=min(values), high=max(values), combinations=len(values), values=tuple(values)
                    )
                    for cell, values in found.items()
                    if values
                },
            )


def _frozen(settings: Combination) -> tuple[tuple[str, Value], ...]:
    return tuple(sorted(settings.items()))


WHETHER_IT_FITS = "whether it fits or not"
LARGEST = "largest models"


def walks(records: Sequence[Record]) -> list[Walk]:
    """Activations of the paper's models under every combination, and under those under which they fit; and
    the sizes of the largest models under every combination of their search, with the activations of the
    paper's models under the same settings.
    """
    found = []
    for half in HALVES:
        table = HALVES[half].table
        memory, largest = hypothesis_record(records, half), capacity_record(records, half)
        activations: dict[Key, dict[tuple[tuple[str, Value], ...], float | None]] = {}
        if memory is not None:
            choices = activation_choices(memory)
            every, places = _in_units(half, choices), possible(memory)
            for key, numbers in every.items():
                activations[key] = dict(zip(map(_frozen, choices.settings), numbers, strict=True))
            fitting = {key: [values[n] for n in places] for key, values in every.items()}
            found += [
                Walk(f"{table}, {WHETHER_IT_FITS}", choices.settings, every),
                Walk(table, [choices.settings[n] for n in places], fitting),
            ]
        if largest is not None:
            sized = capacity_choices(largest)
            columns = largest.details["columns"]
            values_of: dict[Key, list[float | None]] = {
                (table, row, column): [value or None for value in columns[column][name]]
                for row, name in (
                    ("maximum parameters", "parameters"),
                    ("num_layers", "num_layers"),
                    ("num_filters", "num_filters"),
                )
                for column in columns
            }
            shared = [
                _frozen({n: each[n] for n in sized.names if n in SHARED + OWN[half]})
                for each in sized.settings
            ]
            for key, numbers_of in activations.items():
                if all(each in numbers_of for each in shared):  # not where the search left settings out
                    values_of[key] = [numbers_of[each] for each in shared]
            found.append(Walk(f"{table}, {LARGEST}", sized.settings, values_of))
    return found


def _in_units(half: str, choices: Choices) -> dict[Key, list[float | None]]:
    """Activations of one half in the paper's units."""
    table = HALVES[half].table
    units = {cell.key: cell.unit for cell in load_paper() if cell.source == "paper"}
    return {
        (table, ROW, column): [
            None if value is None else convert(value, "bytes", units[table, ROW, column]) for value in values
        ]
        for column, values in choices.columns.items()
    }


def _values(half: str, choices: Choices) -> dict[tuple[Value, ...], dict[Key, float]]:
    """The same by the values of its settings."""
    every = _in_units(half, choices)
    return {
        tuple(settings.values()): {
            key: value for key, values in every.items() if (value := values[index]) is not None
        }
        for index, settings in enumerate(choices.settings)
    }


def _named(settings: Mapping[str, Value], base: Mapping[str, Value]) -> str:
    """What differs from the base."""
    changed = {name: value for name, value in settings.items() if value != base[name]}
    return ", ".join(_words(changed)) or BASE


def _words(settings: Mapping[str, Value]) -> Iterator[str]:
    """`bfloat16, gradients x1, cut by layers, M = 16`."""
    for name, value in settings.items():
        match name:
            case "gradient_copies":
                yield f"gradients x{value}"
            case "boundary_tensors":
                yield f"boundary {value}"
            case "partition_cost":
                yield f"cut by {value}"
            case "num_microbatches":
                yield f"M = {value}"
            case "auxiliary_head":
                yield "auxiliary head" if value else "no auxiliary head"
            case "num_classes":
                yield f"{value} classes"
            case _:
                yield str(value)
