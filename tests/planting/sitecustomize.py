"""An interpreter that is started while a mistake is planted (`mutants.plant`) imports the module with it."""

from __future__ import annotations

import importlib.machinery
import os
from types import CodeType


def plant(original: str, changed: str) -> None:
    """Whatever is imported from the file `original` has the text of `changed`."""
    loader = importlib.machinery.SourceFileLoader
    as_it_is = loader.get_code

    def get_code(self: importlib.machinery.SourceFileLoader, fullname: str) -> CodeType | None:
        path = self.get_filename(fullname)
        if os.path.realpath(path) != original:
            return as_it_is(self, fullname)
        with open(changed, encoding="utf-8") as file:
            return compile(file.read(), path, "exec", dont_inherit=True)

    loader.get_code = get_code  # type: ignore[assignment]


if files := os.environ.get("PLANTED"):
    plant(*files.split(os.pathsep))
