"""Splitting a mini-batch and taking boundary tuples apart."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpipe_bench.pipeline.stage.trees import flatten, merge, sizes, split, unflatten


@given(batch_size=st.integers(1, 60), data=st.data())
def test_sizes_are_even_and_complete(batch_size: int, data: st.DataObject) -> None:
    num_microbatches = data.draw(st.integers(1, batch_size))
    found = sizes(batch_size, num_microbatches)
    assert len(found) == num_microbatches
    assert sum(found) == batch_size
    assert max(found) - min(found) <= 1
    assert list(found) == [len(part) for part in torch.zeros(batch_size).tensor_split(num_microbatches)]


def test_split_gives_views_and_merge_undoes_it() -> None:
    batch = (torch.arange(14).view(7, 2), torch.arange(7))
    parts = split(batch, 3)
    assert [len(image) for image, _ in parts] == [3, 2, 2]
    assert parts[1][0].untyped_storage().data_ptr() == batch[0].untyped_storage().data_ptr()
    for merged, whole in zip(merge(parts), batch, strict=True):
        assert torch.equal(merged, whole)
    assert torch.equal(merge(split(batch[0], 4)), batch[0])


@pytest.mark.parametrize(
    ("batch", "num_microbatches", "complaint"),
    [
        (torch.zeros(3, 2), 4, "num_microbatches is 4 but the mini-batch has only 3 examples"),
        (torch.zeros(0, 2), 1, "empty"),
        (torch.tensor(1.0), 1, "without dimensions"),
        ((torch.zeros(4), torch.zeros(5)), 2, r"\[4, 5\] examples"),
    ],
)
def test_batches_that_cannot_be_split(batch, num_microbatches: int, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        split(batch, num_microbatches)


@pytest.mark.parametrize("batch", [None, (), {}, [1, 2], ({"x": None},)])
def test_a_batch_without_tensors_is_refused(batch) -> None:
    with pytest.raises(
        TypeError, match="the mini-batch is of type .* and holds no tensor; it must be a tensor"
    ):
        split(batch, 1)


def test_an_output_without_examples_cannot_be_merged() -> None:
    with pytest.raises(ValueError, match="without dimensions"):
        merge([torch.tensor(1.0), torch.tensor(2.0)])


def test_a_repeated_tensor_travels_once() -> None:
    a, b = torch.zeros(2), torch.ones(2)
    tensors, structure = flatten((a, b, a))
    assert [t is wanted for t, wanted in zip(tensors, (a, b), strict=True)] == [True, True]
    back = unflatten(tensors, structure)
    assert back[0] is a
    assert back[1] is b
    assert back[2] is a
    assert flatten(a) == ((a,), None)
    assert unflatten((a,), None) is a
    assert isinstance(unflatten(*flatten((a,))), tuple)
