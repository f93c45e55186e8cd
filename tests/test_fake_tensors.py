"""Quick fake tensors answer as torch's own do, whatever was asked before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional

from gpipe_bench.pipeline.memory.fake_tensors import QuickFakeTensors
from gpipe_bench.pipeline.memory.tracker import EventLog

Made = Callable[..., Any]


def normalized(x: Tensor) -> Any:
    channels = x.shape[1]
    weight = torch.ones(channels, requires_grad=True)
    running = torch.zeros(channels), torch.ones(channels)
    y = functional.batch_norm(x.requires_grad_(), *running, weight, torch.zeros(channels), training=True)
    return y, *torch.autograd.grad(y.sum() + y.mean(), (x, weight))


def convolved(x: Tensor) -> Any:
    weight = torch.empty(3, x.shape[1], 1, 1, requires_grad=True)
    y = functional.conv2d(x.requires_grad_(), weight)
    return y, *torch.autograd.grad(y.relu().sum(), (x, weight))


def halved(x: Tensor) -> Any:
    weight = torch.empty(5, x.shape[-1])
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        return functional.linear(x, weight), functional.batch_norm(x.half(), None, None, training=True)


OPERATIONS: dict[str, Made] = {
    "sum of two": lambda x: x + x,
    "sum with a narrower one": lambda x: (x[:1] + x, x + x[:1], x[:, :1] * x, x + x.shape[-1]),
    "sum over the lines": lambda x: x.flatten(1) + torch.ones(x[0].numel()),
    "by a condition": lambda x: torch.where(x > 0, x, x[:1]),
    "another dtype": lambda x: (x.relu(), x.double().relu(), x > 0, x.int() + x),
    "with numbers": lambda x: (x.int() * 1, x.int() * 1.0, x.int() * True),
    "copied": lambda x: (x.clone(), x[:, :2].clone(), x[:1].clone(), x[:1, :2].clone()),
    "into another": lambda x: torch.add(x, x, out=torch.empty_like(x)),
    "in place": lambda x: (x.clone().add_(1).relu_(), x.clone().mul_(x[:1])),
    "shape changed in place": lambda x: x.clone().unsqueeze_(0).transpose_(0, 1),
    "transposed": lambda x: (x[..., 1:].relu(), x.transpose(0, 1).relu(), x.transpose(0, 1) * x[:1, :1]),
    "expanded": lambda x: (x[:1].expand(4, -1, -1, -1).sin(), x[:1].expand_as(x) + 1),
    "pieces": lambda x: (*x.split(1), *x.unbind(1), x[:, :1].relu(), x[..., 1:] + x[..., 1:]),
    "joined": lambda x: (torch.cat((x, x)), torch.stack((x, x), 1), functional.pad(x, (1, 1))),
    "product": lambda x: (x @ x.transpose(-1, -2), functional.linear(x, torch.empty(7, x.shape[-1]))),
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last).relu() + x,
    "pooled": lambda x: functional.max_pool2d(x, 2, return_indices=True),
    "dropout": lambda x: functional.dropout(x, 0.3),
    "with constants": lambda x: x.sum() * 3 + (torch.tensor([1.0, 2.0])[0] * 3).item(),
    "a normalization": normalized,
    "of a part": lambda x: normalized(torch.cat((x, x), 1)[:, x.shape[1] :].detach()),
    "a convolution": convolved,
    "halved": halved,
}
SHAPES = ((2, 3, 4, 7), (3, 3, 6, 6), (1, 3, 4, 5), (4, 1, 8, 8), (7, 5, 4, 5), (2, 3, 1, 5))
"""Lengths that are all different, partly equal, and 1: what is known of some must not be said of others."""


def told(mode: FakeTensorMode, operation: Made, shape: tuple[int, ...]) -> Any:
    """All there is to know of the results, and the storages that appeared and died on the way."""
    with mode:
        x = torch.empty(shape)
        with EventLog() as log:
            log.watch([x])
            try:
                made = operation(x)
            except RuntimeError as error:
                return type(error)
            results = [made] if isinstance(made, Tensor) else [*made]
            assert all(type(each) is FakeTensor for each in results)
            serials = [log.serial_of(each) for each in results]
        looks = [
            (tuple(t.shape), t.stride(), t.storage_offset(), t.dtype, t.device, t.untyped_storage().nbytes())
            for t in results
        ]
        return looks, serials, log.events, log.sizes


@pytest.mark.parametrize("name", OPERATIONS)
def test_results_are_those_of_torch(name: str) -> None:
    for shape in (*SHAPES, *reversed(SHAPES)):  # the second time all is known
        quick = told(QuickFakeTensors(), OPERATIONS[name], shape)
        assert quick == told(FakeTensorMode(), OPERATIONS[name], shape), shape


def test_what_is_wrong_is_still_refused() -> None:
    with QuickFakeTensors():
        for width in (2, 3):
            x = torch.empty(4, width)
            assert (x + torch.empty(width)).shape == (4, width)
            with pytest.raises(RuntimeError, match="broadcast|must match"):
                x + torch.empty(width + 2)
            with pytest.raises(RuntimeError):
                x.sum().item()  # no data


def test_torch_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    dispatch = FakeTensorMode.dispatch

    def counted(self: FakeTensorMode, func: Any, *rest: Any) -> Any:
        asked.append(str(func))
        return dispatch(self, func, *rest)

    monkeypatch.setattr(FakeTensorMode, "dispatch", counted)

    def step() -> None:
        with QuickFakeTensors():
            normalized(torch.empty(2, 29, 3, 3).relu())

    step()
    assert asked
    asked.clear()
    step()
    assert not asked
