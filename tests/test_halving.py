"""The tree by which gradients are summed the same way on every grid."""

from __future__ import annotations

import random

import pytest

from gpipe_bench.pipeline.mesh.collectives import Halving, sum_of


def bracketed(a: str, b: str) -> str:
    return f"({a}{b})"


@pytest.mark.parametrize(
    ("count", "wanted"),
    [(1, "0"), (2, "(01)"), (3, "(0(12))"), (5, "((01)(2(34)))"), (8, "(((01)(23))((45)(67)))")],
)
def test_the_order_of_coming_changes_nothing(count: int, wanted: str) -> None:
    for seed in range(20):
        tree: Halving[str] = Halving(count, bracketed)
        for number in random.Random(seed).sample(range(count), count):
            tree.put(number, str(number))
        assert tree.take() == wanted
        assert tree.take() is None


@pytest.mark.parametrize("replicas", [2, 4, 8])
@pytest.mark.parametrize("each", [1, 3, 4])
def test_a_replica_has_a_subtree(replicas: int, each: int) -> None:
    names = [chr(ord("a") + i) for i in range(replicas * each)]
    of_replicas = [sum_of(names[r * each : (r + 1) * each], bracketed) for r in range(replicas)]
    assert sum_of(of_replicas, bracketed) == sum_of(names, bracketed)


def test_few_are_held() -> None:
    """Of things in order, or in reverse, one for each level."""
    for order in (range(64), reversed(range(64))):
        tree: Halving[int] = Halving(64, lambda a, b: a + b)
        for number in order:
            tree.put(number, number)
            assert len(tree._held) <= 6
        assert tree.take() == sum(range(64))


def test_what_is_missing_is_noticed() -> None:
    tree: Halving[int] = Halving(4, lambda a, b: a + b)
    for number in (0, 1, 3):
        tree.put(number, number)
    assert tree.take() is None
    for number in range(4):  # nothing of the sum before is left
        tree.put(number, number)
    assert tree.take() == 6
