"""What the replicas of a stage tell and send each other, and how long they wait for it.

Each replica waits for the others no longer than its pipeline waits for anything. One that waits in vain asks
what happened where all of the job do (`ranks.failure`), because the replica that it waits for may only wait
for a rank of its own pipeline.

In a step they send sums, begun early and waited for at the end. Every replica begins the same collectives in
the same order; which ones there are follows from the schedule and the parameters alone. They go by
connections of their own, beside the messages of the pipeline, and gradients travel some megabytes at a time,
end to end in one piece of memory, because a collective costs the same few messages whatever it moves.

One tree over the micro-batches of all replicas gives sums of the same bits on every grid. Floating-point sums
depend on how they are grouped, so replicas that sum their own micro-batches one after the other and then each
other's get other bits than one pipeline that sums all of them. A binary tree over all micro-batches, halved
from the top, has every replica's micro-batches as a subtree, if there are 2, 4, 8 ... replicas: each sums its
own, and the rest of the tree sums these.

    0 1 2 3 4 5 6 7      ((0+1)+(2+3)) + ((4+5)+(6+7))      of two replicas: each one of the outer brackets

The gradients of each micro-batch are taken out of `.grad` when its backward is over and put into the tree.
That takes about log2(M) + 1 copies of a stage's gradients, and they cannot leave before the last backward is
over, so it is an option, for those who compare grids bit by bit. Between replicas every part is sent to all,
which sum alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch import distributed as dist

from gpipe_bench.pipeline import devices
from gpipe_bench.pipeline.clock import Journal
from gpipe_bench.pipeline.errors import PeerError, StoreError
from gpipe_bench.pipeline.plan.links import BUCKET_BYTES, bucket_bytes_of
from gpipe_bench.pipeline.plan.schedule import Kind
from gpipe_bench.pipeline.ranks.control import Together
from gpipe_bench.pipeline.ranks.failure import Job, missing
from gpipe_bench.pipeline.ranks.store import Store
from gpipe_bench.pipeline.ranks.wire import Connection, Form, Transit, backend
from gpipe_bench.pipeline.stage.stage import Reduction, Stage

T = TypeVar("T")


class Replicas:
    """The processes of `group`, which run the same stage of one pipeline each; a failure of `job` cuts what
    connects them.

    What waits for other replicas raises `PeerError` if one is missing, with its number in the job where that
    is known, and `StoreError` as the store does.
    """

    def __init__(self, group: dist.ProcessGroup, timeout_s: float, job: Job) -> None:
        self.rank, self.size, self._timeout_s = dist.get_rank(group), dist.get_world_size(group), timeout_s
        self._processes = dist.get_process_group_ranks(group)
        self._store, self.job = Store(group), job
        self._store.connect(timeout_s)
        self._together: Together | None = None
        self._connections: list[Connection] = []

    def gather(self, mine: Tensor) -> list[Tensor]:
        """The tensor of every replica, in the order of their ranks; all must call."""
        return [found.to(mine.device) for found in self.share(mine.cpu())]

    def share(self, mine: T) -> list[T]:
        """What every replica brings, a picklable object, in the order of their ranks; all must call."""
        if self._together is None:
            self.connect("replicas", accelerated=False)
            self._together = Together(self._connections[-1], self.rank, self.size)
        return self.bounded(partial(self._together.gather, mine))

    def connect(self, name: str, *, accelerated: bool, place: tuple[int, int] | None = None) -> Any:
        """A backend of torch's between all replicas, for collectives, which fail after the timeout; all must
        call. Or between some, who say the same name: `place` is then this one's rank among how many.
        """
        rank, size = place or (self.rank, self.size)
        options: dict[str, Any] = {"name": name, "accelerated": accelerated, "timeout_s": self._timeout_s}
        found = self.bounded(lambda: backend(self._store, rank, size, **options, sums=True))
        self._connections.append(Connection(found, 0, {}))
        self.job.cuts(self._connections[-1])
        return found

    def bounded(self, call: Callable[[], T]) -> T:
        """What `call` returns, which waits for other replicas as long as their connections allow."""
        try:
            return call()
        except PeerError as error:
            raise error.numbered(self._processes) from error
        except StoreError:
            raise
        except RuntimeError as error:
            raise missing(error) from error

    def on(self, device: torch.device) -> None:
        """The sums are of tensors on an accelerator: what it waits for is watched from now on."""
        self.job.awaited.begin(partial(devices.mark, device))

    def wait(self, work: Transit) -> None:
        """Until what was begun may be used; on an accelerator by what is enqueued afterwards."""
        with self.job.awaited.waiting(None, None):
            self.bounded(work.wait)

    def close(self) -> None:
        """Ends the connections in good order."""
        for connection in self._connections:
            connection.close()


class Collectives:
    """Collectives between `replicas` by connections called `name`. They raise what `Replicas` do."""

    def __init__(self, replicas: Replicas, name: str, *, accelerated: bool) -> None:
        self.replicas = replicas
        self._backend = replicas.connect(name, accelerated=accelerated)

    def sum(self, numbers: Tensor) -> Transit:
        """Begins to make `numbers`, a contiguous tensor, the sum over the replicas, the same bits on all."""
        return self.replicas.bounded(lambda: self._backend.allreduce([numbers]))  # type: ignore[no-any-return]

    def gather(self, numbers: Tensor) -> tuple[Transit, list[Tensor]]:
        """Begins to collect the tensors of all replicas, in their order."""
        found = [torch.empty_like(numbers) for _ in range(self.replicas.size)]
        return self.replicas.bounded(lambda: self._backend.allgather([found], [numbers])), found

    def wait(self, work: Transit) -> None:
        """Until it may be used; on an accelerator by what is enqueued afterwards."""
        self.replicas.wait(work)

    def copy_from_first(self, tensors: Sequence[Tensor]) -> None:
        """Gives all replicas the values of the first one's tensors, in place; waits for them."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        there = [tensor for tensor in tensors if tensor.numel() and not tensor.is_meta]
        for bucket in buckets_of(there, bucket_bytes=BUCKET_BYTES):
            memory = bucket.fill([there[i] for i in bucket.positions]).view(torch.uint8)
            self.wait(self.replicas.bounded(partial(self._backend.broadcast, [memory], options)))
            for position, view in zip(bucket.positions, bucket.views, strict=True):
                there[position].copy_(view)


class GlobalShares(Sequence[float]):
    """The share of each micro-batch of this replica in the examples of all replicas.

    How many the others have is asked at once and waited for when somebody wants to know, which is behind the
    first forward.
    """

    def __init__(self, lengths: Sequence[int], collectives: Collectives) -> None:
        self._lengths, self._collectives = lengths, collectives
        self._examples = torch.tensor([sum(lengths)], dtype=torch.float64)
        self._work = collectives.sum(self._examples)
        self._shares: tuple[float, ...] | None = None

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, index: Any) -> Any:
        if self._shares is None:
            self._collectives.wait(self._work)
            examples = int(self._examples)
            self._shares = tuple([length / examples for length in self._lengths])
        return self._shares[index]


class FlatBucket:
    """Tensors of one dtype on one device that travel together, end to end, each laid out in memory as it is,
    with a mark for each behind them.

    Attributes:
        positions: which tensors of a list they are
        views: the place of each, when it is filled
        marks: likewise a number for each, 0 for one that is missing
    """

    def __init__(self, positions: Sequence[int], like: Sequence[Tensor]) -> None:
        self.positions = tuple(positions)
        self._forms = [Form.of(tensor) for tensor in like]
        self._dtype, self._device = like[0].dtype, like[0].device
        self._num_elements = sum(tensor.numel() for tensor in like)
        self.empty()

    def empty(self) -> None:
        """Lets go of its memory."""
        self.views: list[Tensor] = []
        self.marks = torch.empty(0)

    def fill(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """Copies them into new memory, zeros for one that is missing; all of it, as real numbers, which is
        what collectives add.
        """
        memory = torch.empty(self._num_elements + len(tensors), dtype=self._dtype, device=self._device)
        self._divide(memory)
        self.marks.fill_(1)
        for place, (tensor, view) in enumerate(zip(tensors, self.views, strict=True)):
            if tensor is None:
                self.marks[place].zero_()
                view.zero_()
            else:
                view.copy_(tensor)
        return torch.view_as_real(memory) if memory.is_complex() else memory

    def take(self, numbers: Tensor) -> None:
        """Has from now on what has been filled elsewhere."""
        self._divide(torch.view_as_complex(numbers) if self._dtype.is_complex else numbers)

    def _divide(self, memory: Tensor) -> None:
        self.views, start = [], 0
        for form in self._forms:
            self.views.append(memory.as_strided(form.shape, form.stride, start))
            start += form.num_bytes // form.dtype.itemsize
        self.marks = memory[start:]


def buckets_of(
    tensors: Sequence[Tensor], order: Iterable[int] = (), bucket_bytes: float | None = None
) -> list[FlatBucket]:
    """Buckets for gradients, or other tensors, in the order in which the buckets leave.

    Collectives are matched by their order alone, so it is the same on all replicas: that in which gradients
    were there in an earlier step. A bucket then waits for nothing but its own.

    Args:
        tensors: what they look like, in the order of the parameters.
        order: positions in the order in which the gradients are there; those that are left out come last,
            the latest parameters first, as in a backward.
        bucket_bytes: a bucket is closed when it holds as much; `bucket_bytes_of` them all if not given.
    """
    if bucket_bytes is None:
        bucket_bytes = bucket_bytes_of(sum(tensor.nbytes for tensor in tensors))
    found: list[list[int]] = []
    open_ones: dict[torch.dtype, list[int]] = {}
    for position in dict.fromkeys([*order, *reversed(range(len(tensors)))]):
        dtype = tensors[position].dtype
        bucket = open_ones.setdefault(dtype, [])
        bucket.append(position)
        if sum(tensors[i].nbytes for i in bucket) >= bucket_bytes:
            found.append(open_ones.pop(dtype))
    return [FlatBucket(bucket, [tensors[i] for i in bucket]) for bucket in (*found, *open_ones.values())]


_Gradients = list[Tensor | None]
_Span = tuple[int, int]


class TreeSums(Reduction):
    """The `Reduction` of one stage by a tree over micro-batches.

    Args:
        stage: whose gradients they are.
        collectives: between its replicas, if there are others.
        journal: where is written when what leaves has begun and ended.
        bucket_bytes: gradients that leave together.
    """

    def __init__(
        self, stage: Stage, collectives: Collectives | None, journal: Journal, bucket_bytes: int | None
    ) -> None:
        self._stage, self._collectives, self._journal = stage, collectives, journal
        self._bucket_bytes = bucket_bytes
        self._tree: Halving[_Gradients] = Halving(1, _add)
        self._parameters: tuple[nn.Parameter, ...] = ()
        self._held: _Gradients = []
        self._early: dict[int, _Gradients] = {}  # of an I that could not be split, by micro-batch
        self._sum: _Gradients = []
        self._sent: list[
            tuple[FlatBucket, Tensor, Transit, list[Tensor]]
        ] = []  # what is sent stays until it has left

    def begin(self, num_microbatches: int, *, sync: bool) -> None:
        assert sync
        self._tree = Halving(num_microbatches, _add)
        self._parameters = self._stage.trainable
        self._held = self._take()

    def before(self, kind: Kind, m: int, *, last: bool) -> None:
        self._stage.look_for_first_gradients()

    def after(self, kind: Kind, m: int, *, last: bool) -> None:
        gradients = self._take()
        if kind is Kind.I:
            self._early[m] = gradients
            return
        if (early := self._early.pop(m, None)) is not None:
            gradients = _add(early, gradients)
        self._tree.put(m, gradients)
        if last:
            self._sum = self._tree.take() or []
            if self._collectives is not None:
                self._send(self._collectives)

    def finish(self) -> None:
        if self._collectives is not None:
            self._receive(self._collectives)
        for parameter, held, gradient in zip(self._parameters, self._held, self._sum, strict=True):
            if held is None:
                parameter.grad = gradient
            else:
                parameter.grad = held if gradient is None else held.add_(gradient)
        self._held, self._sum = [], []

    def reset(self) -> None:
        for parameter, held in zip(self._parameters, self._held, strict=False):
            parameter.grad = held
        self._tree.take()
        self._early, self._held, self._sum, self._sent = {}, [], [], []

    def _take(self) -> _Gradients:
        """What is in `.grad`, which has nothing afterwards."""
        found = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        return found

    @torch.no_grad()
    def _send(self, collectives: Collectives) -> None:
        for number, bucket in enumerate(buckets_of(self._parameters, bucket_bytes=self._bucket_bytes)):
            numbers = bucket.fill([self._sum[i] for i in bucket.positions])
            self._journal.begun(self._stage.index, number)
            work, found = collectives.gather(numbers)
            self._journal.watch(work, self._stage.index, number)
            self._sent.append((bucket, numbers, work, found))

    @torch.no_grad()
    def _receive(self, collectives: Collectives) -> None:
        for number, (bucket, _, work, found) in enumerate(self._sent):
            collectives.wait(work)
            self._journal.waited(self._stage.index, number)
            bucket.take(sum_of(found, torch.add))
            for position, view, mark in zip(
                bucket.positions, bucket.views, bucket.marks.tolist(), strict=True
            ):
                self._sum[position] = view if mark else None
        self._sent = []


@torch.no_grad()
def _add(left: _Gradients, right: _Gradients) -> _Gradients:
    """The sums of gradients, where there are any, in memory of their own."""
    return [b if a is None else a if b is None else a + b for a, b in zip(left, right, strict=True)]


class Halving(Generic[T]):
    """The sum of `count` things, numbered from 0, of which `add` makes one of two.

    A sum is made as soon as both of its halves are there, whatever the order in which they come, so that of n
    things in order log2(n) + 1 are held at most.
    """

    def __init__(self, count: int, add: Callable[[T, T], T]) -> None:
        self._whole, self._add = (0, count), add
        self._other_half: dict[_Span, _Span] = {}
        self._held: dict[_Span, T] = {}
        self._halve(self._whole)

    def _halve(self, span: _Span) -> None:
        start, end = span
        if end - start > 1:
            low, high = (start, (start + end) // 2), ((start + end) // 2, end)
            self._other_half[low], self._other_half[high] = high, low
            self._halve(low)
            self._halve(high)

    def put(self, number: int, thing: T) -> None:
        """Takes in one of them."""
        span = (number, number + 1)
        while span != self._whole and (other := self._other_half[span]) in self._held:
            found = self._held.pop(other)
            thing = self._add(thing, found) if span < other else self._add(found, thing)
            span = (min(span[0], other[0]), max(span[1], other[1]))
        self._held[span] = thing

    def take(self) -> T | None:
        """The sum, once all are in, and begins anew; None if any is missing."""
        found = self._held.pop(self._whole, None)
        self._held = {}
        return found


def sum_of(things: Sequence[T], add: Callable[[T, T], T]) -> T:
    """The sum of all of them, at least one, by the same tree."""
    tree = Halving(len(things), add)
    for number, thing in enumerate(things):
        tree.put(number, thing)
    found = tree.take()
    assert found is not None
    return found
