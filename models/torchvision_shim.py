"""Imports torchvision next to a torch that was built without CUDA.

The default wheel of torchvision is linked against CUDA. Beside a CPU build of torch its library of
operators does not load, and `import torchvision` then ends in "operator torchvision::nms does not exist",
because it describes operators that nobody declared. Declaring them is enough for everything but
detection: models and transforms are Python.

Where torchvision imports by itself nothing is declared. Remove this module when torchvision guards those
descriptions by itself.
"""

import importlib
import re
import sys
from types import ModuleType

import torch

# The operators that torchvision describes without asking whether they loaded.
_SIGNATURES = {
    "nms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
# A declaration lasts as long as the object that made it.
_declared: dict[str, torch.library.Library] = {}


def import_torchvision() -> ModuleType:
    """Returns the torchvision module; raises what its import raises for any other reason."""
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
    # Python would take the modules that the failed import left behind for complete.
    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        del sys.modules[name]
