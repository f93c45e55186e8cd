"""What a model without GPipe keeps if a compiler computes again more than it does by default.

Naive-1 is where our predictions of Table 1 lie farthest from the paper: kept by every operation, or by what a
fusing compiler keeps by default, the activations are about twice what is printed. A compiler may go further.
It may keep the outputs of matrix products and convolutions alone, and compute again what follows from them
element by element; or it may keep the smallest cut of the graph from which everything but products and
convolutions can be computed again, as torch's own compiler does on request. Both were thought of once the
difference had been seen, so no range covers them: they are reasons by name (results/unknowns.toml), computed
here over everything else that is left open.
"""

from __future__ import annotations

from functools import cache, partial
from itertools import product
from typing import Any

from gpipe_bench.experiments.predicted.sizes import FullSize, scaled
from gpipe_bench.experiments.table1.as_published import (
    BYTES_PER_PARAMETER,
    GRADIENT_BYTES,
    counted,
    largest,
    num_parameters,
    stages_of,
)
from gpipe_bench.experiments.table1.largest import Size, largest_size
from gpipe_bench.experiments.table1.settings import CAP, OWN_OF_MODEL, Combination, allowed, unknown
from gpipe_bench.harness.experiment import Outcome
from gpipe_bench.harness.record import Quantity
from gpipe_bench.harness.unknowns import Reason, load_unknowns
from gpipe_bench.models.paper import HALVES, column

ITEMSIZE = {"float32": 4, "bfloat16": 2}
PRODUCTS_ONLY = "products only"
COMPLETED: Combination = {
    "tensor_layout": "dense", "partition_cost": "layers", "partition_rule": "least variance",
    "boundary_tensors": "inputs",
}  # fmt: skip
"""Settings that change nothing of a model on one accelerator, or that a reason leaves out."""


def reasons(half: str) -> Outcome:
    """Activations of the paper's naive-1 and the largest model that fits, for every reason of this half,
    under everything else that is left open.
    """
    found = [_tried(half, reason) for reason in load_unknowns().reasons(HALVES[half].table)]
    tried = sum(len(each["bytes"]) for each in found)
    combinations = Quantity(name="combinations", value=tried, unit="number", provenance="modelled")
    return Outcome((combinations,), {"reasons": found})


def _tried(half: str, reason: Reason) -> dict[str, Any]:
    """One reason: its settings with the bytes and the largest models that they give."""
    kept_by = str(reason.settings["kept_by"])
    counts_products = kept_by == PRODUCTS_ONLY
    size = column(half, "naive-1")
    names = ("activation_format", "gradient_copies", *OWN_OF_MODEL[half])
    choices = {name: allowed(half)[name] for name in names}
    activations = []
    for each in _product(choices):
        if counts_products:
            of_model = (half, size.num_layers, size.num_filters, each)
            activations.append(_kept(*of_model) + _gradients(*of_model))
        else:
            stages = stages_of(half, size, {**COMPLETED, **each, "kept_by": kept_by})
            assert stages is not None, "a single stage has every layer"
            activations.append(counted(stages[0], {**COMPLETED, **each}))
    grid = {
        "activation_format": allowed(half)["activation_format"],
        "gradient_copies": tuple(copies for copies in allowed(half)["gradient_copies"] if copies),
        CAP: unknown(half)[CAP].ends,
        **({"filters_step": unknown(half)["filters_step"].allowed} if half == "amoebanet" else {}),
    }  # fmt: skip
    found = []
    for each in _product(grid):
        if counts_products:
            best = largest_size(
                half, partial(_fits, half, each), partial(num_parameters, half),
                step=int(each.get("filters_step", 1)), guess=(size.num_layers, size.num_filters),
            )  # fmt: skip
        else:
            best = largest(half, size, {**COMPLETED, **each, "kept_by": kept_by})
        found.append(best or Size(0, 0, 0))
    return {
        "name": reason.name,
        "settings": {name: list(values) for name, values in choices.items()},
        "bytes": activations,
        "capacity": {
            "settings": {name: list(values) for name, values in grid.items()},
            "parameters": [each.num_parameters for each in found],
            "sizes": [[each.num_layers, each.num_filters] for each in found],
        },
    }


def _product(choices: dict[str, tuple[Any, ...]]) -> list[Combination]:
    return [dict(zip(choices, values, strict=True)) for values in product(*choices.values())]


def _kept(half: str, num_layers: int, num_filters: int, settings: Combination) -> int:
    """Bytes of the outputs of all products of a forward pass over the mini-batch."""
    full = _full(half, num_layers, num_filters, settings)
    return ITEMSIZE[str(settings["activation_format"])] * _outputs(full, HALVES[half].batch_size)


def _gradients(half: str, num_layers: int, num_filters: int, settings: Combination) -> int:
    """Bytes of the copies of the parameters' gradients that are counted."""
    full = _full(half, num_layers, num_filters, settings)
    return int(settings["gradient_copies"]) * GRADIENT_BYTES * sum(full.parameters)


@cache
def _outputs(full: FullSize, examples: int) -> int:
    """Elements that all products make."""
    return sum(
        scaled(count, examples) * scaled(rows, examples) * scaled(columns, examples)
        for layer in full.layers
        for operation in layer.forward
        for count, rows, _, columns in operation.products
    )


def _full(half: str, num_layers: int, num_filters: int, settings: Combination) -> FullSize:
    options: dict[str, Any] = {**HALVES[half].options, "num_layers": num_layers}
    if half == "transformer":
        return FullSize(HALVES[half].model, {**options, "attention": "explicit"})
    options |= {"num_filters": num_filters, "num_classes": settings.get("num_classes", 1001)}
    return FullSize(HALVES[half].model, {**options, "aux_head": settings.get("auxiliary_head", True)})


def _fits(half: str, settings: Combination, num_layers: int, num_filters: int) -> bool:
    of_model = (half, num_layers, num_filters, settings)
    parameters = BYTES_PER_PARAMETER * num_parameters(half, num_layers, num_filters)
    return parameters + _kept(*of_model) + _gradients(*of_model) <= float(settings[CAP])
