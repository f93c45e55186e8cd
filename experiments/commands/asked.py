"""What `plan` and `size` both take from the command line: options that are called the same and mean the same,
and one refusal for each value that is none.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

GIB = 2**30
PRECISIONS = {"float32": "float32", "fp32": "float32", "bfloat16": "bfloat16", "bf16": "bfloat16"}
MOST_GIB = 1e6


def model_options(verb: argparse.ArgumentParser, without: str = "") -> None:
    """Which model, and how large."""
    verb.add_argument(
        "model", metavar="MODEL",
        help="a published shape (gpt2-xl, llama-8b, unet-5-64 ...), transformer-lm or amoebanet-d with Table "
        "1's options, or your own as module:function",
    )  # fmt: skip
    verb.add_argument(
        "--num-layers", type=int, metavar="L",
        help="blocks of GPT-2 or Llama, in the place of the shape's own; of transformer-lm and amoebanet-d"
        + without,
    )  # fmt: skip
    verb.add_argument("--num-filters", type=int, metavar="D", help="of amoebanet-d, with --num-layers")


def reserve_option(machines: Any) -> None:
    """What of the memory is not planned with."""
    machines.add_argument(
        "--reserve-gib", type=float, metavar="GIB",
        help="of each, for what is no tensor: context, kernels, workspaces, buffers of collectives; default: "
        "1.5 of an accelerator that is named, else 0",
    )  # fmt: skip


def training_options(group: Any, default: str | None = "adam") -> None:
    """What a step is made of besides the mini-batch."""
    said = default or "adam; rmsprop where the largest is searched"
    group.add_argument(
        "--optimizer", choices=("sgd", "rmsprop", "adam"), default=default, help=f"default: {said}"
    )
    group.add_argument(
        "--precision", default="float32", metavar="TYPE",
        help="of the activations (autocast): float32 or bfloat16, also fp32, bf16; default: %(default)s",
    )  # fmt: skip
    group.add_argument(
        "--compiled", action="store_true",
        help="layers as torch.compile keeps them, each by itself; takes seconds more",
    )  # fmt: skip


def memory_bytes(arguments: argparse.Namespace) -> int:
    """Of one accelerator. `ValueError` for what none has."""
    if not 2**-20 <= arguments.memory_gib < MOST_GIB:
        raise ValueError(
            f"--memory-gib {arguments.memory_gib:g}: give the GiB of one accelerator, such as 24"
        )
    return int(arguments.memory_gib * GIB)


def reserve_bytes(arguments: argparse.Namespace) -> int | None:
    """Held back of it; None where nobody says. `ValueError` for less than nothing."""
    if arguments.reserve_gib is None:
        return None
    if not 0 <= arguments.reserve_gib < MOST_GIB:
        raise ValueError(
            f"--reserve-gib {arguments.reserve_gib:g}: give the GiB of each accelerator that are not for "
            "tensors, 0 or more"
        )
    return int(arguments.reserve_gib * GIB)


def check_counts(arguments: argparse.Namespace, *names: str) -> None:
    """`ValueError` for an option that is given with a number below 1, alone or in a list."""
    for name in names:
        given = getattr(arguments, name)
        for number in given if isinstance(given, list) else [given]:
            if number is not None and number < 1:
                raise ValueError(f"--{name.replace('_', '-')} {number}: give 1 or more")


def precision(arguments: argparse.Namespace) -> str:
    """The name that the library has for it. `ValueError` for one that is not known."""
    if arguments.precision not in PRECISIONS:
        raise ValueError(f"--precision {arguments.precision}: choose one of {', '.join(PRECISIONS)}")
    return PRECISIONS[arguments.precision]


def find_own_modules() -> None:
    """Makes one's own modules importable from the folder in which this was started."""
    if "" not in sys.path:
        sys.path.insert(0, "")
