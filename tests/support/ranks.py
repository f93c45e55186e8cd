"""What the cases of several processes share: this process's place among them, and the tolerances."""

from __future__ import annotations

import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch import distributed as dist

from gpipe_bench.pipeline import Pipeline

TIMEOUT_S = 40.0  # of processes that share their cores with other tests


class Ranks:
    """A process group that runs one pipeline, and this process's place in it."""

    def __init__(self, group: dist.ProcessGroup | None = None, **options: object) -> None:
        self.group, self.options = group or dist.group.WORLD, options
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.is_first, self.is_last = self.rank == 0, self.rank == self.size - 1

    def pipeline(
        self, layers: nn.Sequential | list[nn.Module], num_microbatches: int = 4, **options
    ) -> Pipeline:
        options = {"cost": [1] * len(layers), "timeout_s": TIMEOUT_S, **self.options, **options}
        return Pipeline(
            layers, num_stages=self.size, num_microbatches=num_microbatches, group=self.group, **options
        )

    def own(self, batch: object, target: Tensor) -> tuple[object, Tensor]:
        """The batch on the first rank, the target on the last; elsewhere data that must not be used."""
        wrong = (torch.full((1, 1), float("nan")), torch.zeros(1))
        return batch if self.is_first else wrong, target if self.is_last else torch.full((1,), float("nan"))


def halves(**options: object) -> Ranks:
    """Ranks 0, 1 and ranks 2, 3 as pipelines of their own."""
    first = dist.get_rank() // 2 * 2
    return Ranks(dist.new_group([first, first + 1], use_local_synchronization=True), **options)


def shared_folder() -> Path:
    """An empty folder that all ranks know."""
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    return Path(folder[0])


def on_first_rank(check: Callable[[], None]) -> None:
    """What one process can look at for all: where it finds something wrong, the check fails on every rank."""
    found: list[str | None] = [None]
    if dist.get_rank() == 0:
        try:
            check()
        except Exception:
            found = [traceback.format_exc()]
    dist.broadcast_object_list(found)
    assert found[0] is None, found[0]


class raises:  # noqa: N801
    """Expects an error with a text in it, like `pytest.raises`, which a spawned process need not import."""

    def __init__(self, kind: type[Exception] | tuple[type[Exception], ...], text: str) -> None:
        self.kind, self.text = kind, text

    def __enter__(self) -> raises:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        assert error is not None, f"nothing was raised, not {self.kind}"
        if not isinstance(error, self.kind):
            return False
        assert self.text in str(error), f"{self.text!r} is not in {error}"
        self.found = str(error)
        return True
