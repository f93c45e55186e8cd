"""Memory that two processes map: made by the one that receives, written by the one that sends.

It is anonymous (memfd), so that nothing is left in the file system when a process dies; the descriptor is
handed over through the neighbours' socket.
"""

from __future__ import annotations

import mmap
import os


class Segment:
    """Memory of this process that a neighbour maps, given out from the front."""

    def __init__(self, size: int) -> None:
        self.size, self._used = size, 0
        self.descriptor = os.memfd_create("pipeline")
        os.posix_fallocate(self.descriptor, 0, size)  # a lack of memory is an error here, not a signal later
        self.memory = mmap.mmap(self.descriptor, size)

    @property
    def free(self) -> int:
        return self.size - self._used

    def take(self, size: int) -> int:
        offset, self._used = self._used, self._used + size
        return offset
