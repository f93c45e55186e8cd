"""Which gradients travel together, in which order.

A collective costs the same few messages whatever it moves, so gradients leave some megabytes at a time. The
buckets leave strictly in one order, the same on all replicas, because collectives are matched by their order
alone. It is the order in which gradients were there in an earlier step: a bucket then waits for nothing but
its own.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

from gpipe_bench.pipeline.plan.reductions import bucket_bytes_of


def buckets(
    sizes_bytes: Sequence[int],
    kinds: Sequence[Hashable],
    order: Iterable[int] = (),
    bucket_bytes: int | None = None,
) -> tuple[tuple[int, ...], ...]:
    """The positions of gradients, bucket by bucket, in the order in which the buckets leave.

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
