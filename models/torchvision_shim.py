"""Imports torchvision beside a build of torch without CUDA.

The default wheel of torchvision is linked against CUDA. With a CPU build of torch its operators do not load,
and `import torchvision` fails with "operator torchvision::nms does not exist", because it describes operators
that are not declared. Declaring them is enough for everything but detection.

If torchvision can be imported, nothing is declared. Remove this module when torchvision checks whether its
operators are loaded.
"""

import importlib
import re
import sys
from types import ModuleType

import torch

# The operators that torchvision describes without that check.
_SIGNATURES = {
    "nms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
# A declaration lasts as long as the object that made it.
_declared: dict[str, torch.library.Library] = {}


def import_torchvision() -> ModuleType:
    """Returns the torchvision module; other errors of its import are raised."""
    while True:
        try:
            return importlib.import_module("torchvision")
        except RuntimeError as error:
            found = re.search(r"operator torchvision::(\w+) does not exist", str(error))
            operator = found.group(1) if found else ""
            if torch.version.cuda is not None or operator not in _SIGNATURES or operator in _declared:
                raise
            _declare(operator)


def _declare(operator: str) -> None:
    library = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
    library.define(operator + _SIGNATURES[operator])  # type: ignore[no-untyped-call]
    _declared[operator] = library
    # Python would treat modules left by the failed import as complete.
    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        del sys.modules[name]
