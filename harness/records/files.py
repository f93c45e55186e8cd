"""Writing a file so that nobody ever reads half of it: not while it is written, not after a kill or on a full
disk.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_whole(path: Path, content: str | bytes) -> None:
    """Replaces the file, or leaves the one before as it is; text as UTF-8. Makes the folder.

    Raises OSError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with open(descriptor, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
        os.chmod(name, 0o644)  # a temporary file is its owner's alone
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
