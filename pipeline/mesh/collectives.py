"""What the replicas of a stage tell and send each other, and how long they wait for it.

Each replica waits for the others no longer than its pipeline waits for anything. One that waits in vain asks
what happened where all of the job do (`ranks.failures.job`), because the replica that it waits for may only
wait for a rank of its own pipeline.

In a step they send sums, begun early and waited for at the end. Every replica begins the same collectives in
the same order; which ones there are follows from the schedule and the parameters alone. They go by
connections of their own, beside the messages of the pipeline, and gradients travel some megabytes at a time,
end to end in one piece of memory, because a collective costs the same few messages whatever it moves.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

from gpipe_bench.pipeline.errors import PeerError, StoreError
from gpipe_bench.pipeline.plan.reductions import bucket_bytes_of
from gpipe_bench.pipeline.ranks.failures.collective import missing
from gpipe_bench.pipeline.ranks.failures.job import Job
from gpipe_bench.pipeline.ranks.store import Store
from gpipe_bench.pipeline.ranks.together import Together
from gpipe_bench.pipeline.ranks.wire import Connection, Form, Work, backend

T = TypeVar("T")
_PIECE_BYTES = 25 * 2**20


class Replicas:
    """The processes of `group`, which run the same stage of one pipeline each; a failure of `job` cuts what
    connects them.
    """

    def __init__(self, group: dist.ProcessGroup, timeout_s: float, job: Job) -> None:
        self.rank, self.size, self._timeout_s = dist.get_rank(group), dist.get_world_size(group), timeout_s
        self._processes = dist.get_process_group_ranks(group)
        self._store, self._job = Store(group), job
        self._store.connect(timeout_s)
        self._together: Together | None = None
        self._connections: list[Connection] = []

    def gather(self, mine: Tensor) -> list[Tensor]:
        """The tensor of every replica, in the order of their ranks; all must call. Errors as in `bounded`."""
        return [found.to(mine.device) for found in self.share(mine.cpu())]

    def share(self, mine: T) -> list[T]:
        """What every replica brings, a picklable object, in the order of their ranks; all must call. Errors
        as in `bounded`.
        """

        def exchange() -> list[T]:
            if self._together is None:
                connection = Connection(self._connect("replicas", accelerated=False), 0, {})
                self._together = Together(connection, self.rank, self.size)
            return self._together.gather(mine)

        return self.bounded(exchange)

    def connect(self, name: str, *, accelerated: bool, place: tuple[int, int] | None = None) -> Any:
        """A backend of torch's between all replicas, for collectives, which fail after the timeout; all must
        call. Or between some, who say the same name: `place` is then this one's rank among how many. Errors
        as in `bounded`.
        """
        return self.bounded(lambda: self._connect(name, accelerated=accelerated, place=place))

    def bounded(self, call: Callable[[], T]) -> T:
        """What `call` returns, which waits for other replicas as long as their connections allow.

        `PeerError` if one is missing, with its number in the job where that is known; `StoreError` as the
        store raises it.
        """
        try:
            return call()
        except PeerError as error:
            raise error.numbered(self._processes) from error
        except StoreError:
            raise
        except RuntimeError as error:
            raise missing(error) from error

    def close(self) -> None:
        """Ends the connections in good order."""
        for connection in self._connections:
            connection.close()

    def _connect(self, name: str, *, accelerated: bool, place: tuple[int, int] | None = None) -> Any:
        rank, size = place or (self.rank, self.size)
        ways = backend(self._store, rank, size, name=name, accelerated=accelerated, timeout_s=self._timeout_s)
        self._connections.append(Connection(ways, 0, {}))
        self._job.cuts(self._connections[-1])
        return ways


@dataclass(frozen=True)
class Collectives:
    """Collectives of a backend of torch's between `replicas`. Errors as in `Replicas.bounded`."""

    replicas: Replicas
    backend: Any

    def sum(self, numbers: Tensor) -> Work:
        """Begins to make `numbers`, a contiguous tensor, the sum over the replicas, the same bits on all."""
        return self.replicas.bounded(lambda: self.backend.allreduce([numbers]))  # type: ignore[no-any-return]

    def gather(self, numbers: Tensor) -> tuple[Work, list[Tensor]]:
        """Begins to collect the tensors of all replicas, in their order."""
        found = [torch.empty_like(numbers) for _ in range(self.replicas.size)]
        return self.replicas.bounded(lambda: self.backend.allgather([found], [numbers])), found

    def wait(self, work: Work) -> None:
        """Until it may be used; on an accelerator by what is enqueued afterwards."""
        self.replicas.bounded(work.wait)

    def take_over(self, tensors: Sequence[Tensor]) -> None:
        """Gives all replicas the values of the first one's tensors, in place; waits for them."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        kinds: dict[torch.dtype, list[Tensor]] = {}
        for tensor in tensors:
            if tensor.numel() and not tensor.is_meta:
                kinds.setdefault(tensor.dtype, []).append(tensor)
        for alike in kinds.values():
            for some in _pieces(alike):
                flat = Room(some).filled(some)
                broadcast = partial(self.backend.broadcast, [flat.memory.view(torch.uint8)], options)
                self.wait(self.replicas.bounded(broadcast))
                for view, tensor in zip(flat.views, some, strict=True):
                    tensor.copy_(view)


def _pieces(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    found: list[list[Tensor]] = [[]]
    num_bytes = 0
    for tensor in tensors:
        if num_bytes > _PIECE_BYTES:
            found.append([])
            num_bytes = 0
        found[-1].append(tensor)
        num_bytes += tensor.nbytes
    return found


class Flat(NamedTuple):
    """Tensors end to end.

    Args:
        memory: all of it
        views: the place of each tensor
        marks: behind them a number for each, where the room has marks: 0 for one that is missing
    """

    memory: Tensor
    views: list[Tensor]
    marks: Tensor

    @property
    def numbers(self) -> Tensor:
        """All of it as real numbers, which is what collectives add."""
        return torch.view_as_real(self.memory) if self.memory.is_complex() else self.memory


class Room:
    """What tensors of one dtype on one device need to stand end to end, each laid out in memory as it is.

    Args:
        like: what the tensors look like, at least one.
        marked: whether there is a mark for each behind them.
    """

    def __init__(self, like: Sequence[Tensor], *, marked: bool = False) -> None:
        self._forms = [Form.of(tensor) for tensor in like]
        self._dtype, self._device = like[0].dtype, like[0].device
        self._count = sum(tensor.numel() for tensor in like)
        self._marks = len(like) if marked else 0

    def filled(self, tensors: Sequence[Tensor | None]) -> Flat:
        """New memory with copies of them; zeros for one that is missing."""
        memory = torch.empty(self._count + self._marks, dtype=self._dtype, device=self._device)
        flat = self._divide(memory)
        flat.marks.fill_(1)
        for place, (tensor, view) in enumerate(zip(tensors, flat.views, strict=True)):
            if tensor is None:
                flat.marks[place].zero_()
                view.zero_()
            else:
                view.copy_(tensor)
        return flat

    def of(self, numbers: Tensor) -> Flat:
        """Memory that has been filled elsewhere, as `Flat.numbers`."""
        return self._divide(torch.view_as_complex(numbers) if self._dtype.is_complex else numbers)

    def _divide(self, memory: Tensor) -> Flat:
        views, start = [], 0
        for form in self._forms:
            views.append(memory.as_strided(form.shape, form.stride, start))
            start += form.num_bytes // form.dtype.itemsize
        return Flat(memory, views, memory[self._count :])


def buckets(
    sizes_bytes: Sequence[int],
    kinds: Sequence[Hashable],
    order: Iterable[int] = (),
    bucket_bytes: int | None = None,
) -> tuple[tuple[int, ...], ...]:
    """The positions of gradients, bucket by bucket, in the order in which the buckets leave.

    Collectives are matched by their order alone, so it is the same on all replicas: that in which gradients
    were there in an earlier step. A bucket then waits for nothing but its own.

    Args:
        sizes_bytes: of each gradient, in the order of the parameters.
        kinds: of each; a bucket has one kind, such as a dtype.
        order: positions in the order in which the gradients are there; those that are left out come last,
            the latest parameters first, as in a backward.
        bucket_bytes: a bucket is closed when it holds as much; `bucket_bytes_of` them all if not given.
    """
    enough_bytes = bucket_bytes_of(sum(sizes_bytes)) if bucket_bytes is None else bucket_bytes
    in_order = dict.fromkeys([*order, *reversed(range(len(sizes_bytes)))])
    found: list[tuple[int, ...]] = []
    open_ones: dict[Hashable, list[int]] = {}
    for position in in_order:
        bucket = open_ones.setdefault(kinds[position], [])
        bucket.append(position)
        if sum(sizes_bytes[each] for each in bucket) >= enough_bytes:
            found.append(tuple(open_ones.pop(kinds[position])))
    return (*found, *map(tuple, open_ones.values()))
