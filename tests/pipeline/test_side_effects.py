"""Layers that do more than map their input to their output: right, refused with the remedy, or found by
`verify`, which says nothing of what is right and changes nothing.
"""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import side_effects as does
import torch
import verify_cases
from case_runner import Outcomes, assert_passed, named
from side_effects import WIDTH, Dense, Does
from tiny_models import (
    assert_own_gradients,
    assert_trains_as_plain,
    everything,
    everything_batch,
    mlp_batch,
    seeded,
)
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from gpipe_bench.pipeline import ActionError, Pipeline, VerifyError

mse_loss, cross_entropy = nn.functional.mse_loss, nn.functional.cross_entropy
Layers = Callable[[], list[nn.Module]]
CASES = named(*verify_cases.CASES)


@pytest.mark.processes
@pytest.mark.parametrize("case", CASES)
def test_case(case: str, outcomes: Outcomes) -> None:
    assert_passed(outcomes, case)


def zeros(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(WIDTH, dtype=dtype)


def dense_linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def reading(first: Callable[[], nn.Module], second: Callable[[nn.Module], nn.Module]) -> Layers:
    """A layer, and one two places on that has to do with it."""

    def build() -> list[nn.Module]:
        source = first()
        return [source, Dense(), second(source)]

    return build


def alone(kind: Callable[[], nn.Module]) -> Layers:
    return lambda: [Dense(), kind(), Dense()]


OTHER = "gives another output in the recomputation of micro-batch 2 than in its forward: "
UNKNOWN = f"{OTHER}a layer goes by something that has changed since"
WEIGHT = "changes a parameter in its forward, which the micro-batches before it have used"


def attribute(name: str) -> str:
    return f"{OTHER}attribute '{name}' of layer 1 (Does) changes in each forward; keep it in a buffer"


# Kind: the layers, cut into two stages; what an error says without and with re-materialization, and None
# where it trains as the plain model.
KINDS: dict[str, tuple[Layers, str | None, str | None]] = {
    "counts": (alone(lambda: Does(does.counts, n=0)), None, attribute("n")),
    "counts unread": (alone(lambda: Does(does.counts_unread, n=0)), None, None),
    "reads its log": (alone(lambda: Does(does.reads_its_log, log=[])), None, attribute("log")),
    "remembers": (alone(lambda: Does(does.remembers, state={})), None, attribute("state")),
    "remembers in place": (
        alone(lambda: Does(does.remembers_in_place, state={"mean": zeros(torch.float64)})), None,
        attribute("state"),
    ),
    "goes by the first input": (alone(lambda: Does(does.goes_by_the_first, scale=None)), None, None),
    "makes a table": (alone(lambda: Does(does.makes_a_table, table=None)), None, None),
    "an object": (
        alone(lambda: Does(does.counts_in_an_object, holder=does.Holder())), None, attribute("holder"),
    ),
    "a buffer": (alone(lambda: Does(does.moves_its_buffer, mean=zeros())), None, None),
    "a buffer by data": (alone(lambda: Does(does.moves_it_by_data, mean=zeros())), None, UNKNOWN),
    "an integer in place": (
        alone(lambda: Does(does.counts_in_integers, calls=torch.tensor(0))),
        "let it make a new one (self.n = self.n + 1)", None,
    ),
    "changes its weight": (alone(does.ChangesItsWeight), WEIGHT, WEIGHT),
    "clamps its weight": (alone(does.Clamps), WEIGHT, WEIGHT),
    "trains inside": (alone(lambda: Does(does.probes)), None, "use torch.autograd.grad there"),
    "asks for a gradient": (alone(lambda: Does(does.adds_a_slope)), None, None),
    "hooks its output": (alone(lambda: Does(does.hooks_its_output)), None, "forwards run without a graph"),
    "hooks where it can": (alone(lambda: Does(does.hooks_where_it_can)), None, None),
    "asks whether there is a graph": (alone(lambda: Does(does.asks_for_gradients)), None, UNKNOWN),
    "a counting hook": (alone(does.hooked), None, UNKNOWN),
    "a hook in the backward": (alone(does.hook_in_backward), None, None),
    "checkpointed": (alone(does.Checkpointed), None, None),
    "noise of its own": (
        alone(lambda: Does(does.noise_of_its_own, generator=torch.Generator().manual_seed(1))), None,
        attribute("generator"),
    ),
    "leaves a loss": (
        alone(does.LeavesAux), None, "attribute 'aux' of layer 1 (LeavesAux) holds a tensor with a graph",
    ),
    "reads what is left": (
        reading(does.LeavesAux, does.ReadsAux), "Trying to backward through the graph a second time",
        "gives another output in the recomputation",
    ),
    "a type": (
        lambda: [does.MakesSpecial(), does.AsksForSpecial()], "is of type Special", "is of type Special",
    ),
    "an attribute of a tensor": (
        lambda: [Does(does.sets_scale), Dense()], "has the attribute 'scale'", "has the attribute 'scale'",
    ),
    "experts": (alone(does.Experts), None, None),
    "a gradient for some": (
        alone(lambda: Does(does.needs_none_for_some)), "y + 0 * parameter.sum()", "y + 0 * parameter.sum()",
    ),
    "spectral norm": (alone(lambda: parametrizations.spectral_norm(dense_linear())), None, None),
    "weight norm": (alone(lambda: parametrizations.weight_norm(dense_linear())), None, None),
}  # fmt: skip


@pytest.mark.parametrize("remat", ["never", "always"])
@pytest.mark.parametrize("kind", KINDS)
def test_it_trains_as_the_plain_model_or_says_why_not(kind: str, remat: str) -> None:
    build, *words = KINDS[kind]
    options = {"num_steps": 3, "num_stages": 2, "remat": remat}
    wanted = words[remat == "always"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of counts that nobody reads
        if wanted is not None:
            with pytest.raises(ActionError) as caught:
                assert_trains_as_plain(
                    lambda: nn.Sequential(*build()), lambda step: mlp_batch(7, seed=step), mse_loss, 3,
                    **options,
                )  # fmt: skip
            assert wanted in str(caught.value)
            return
        pipeline, _ = assert_trains_as_plain(
            lambda: nn.Sequential(*build()), lambda step: mlp_batch(7, seed=step), mse_loss, 3, **options
        )
        assert pipeline.verify(*mlp_batch(7, seed=3), mse_loss) < 1e-12


class Last(Dense):
    def forward(self, given: Tensor | dict[str, Tensor]) -> Tensor:
        return super().forward(given["y"] if isinstance(given, dict) else given)


@pytest.mark.parametrize(
    ("kind", "remat", "words"),
    [
        (lambda: Does(does.noise_of_numpy), "always", "draws random numbers that are not"),
        (lambda: Does(does.noise_of_python), "always", "draws random numbers that are not"),
        (does.Recurrent, "always", "attribute 'h' of layer 0 (Recurrent) changes"),
        (does.OtherKeys, "never", "as in a dict with all keys"),
    ],
)
def test_what_the_plain_model_cannot_show_is_refused(
    kind: Callable[[], nn.Module], remat: str, words: str
) -> None:
    torch.manual_seed(0)
    layers = [kind().double(), Last().double()]
    with pytest.raises(ActionError) as caught:
        Pipeline(layers, num_stages=2, num_microbatches=3, remat=remat).step(*mlp_batch(6), mse_loss)
    assert words in str(caught.value)


def test_a_log_is_warned_of_and_trains_right() -> None:
    pipeline = Pipeline([Does(does.logs, log=[]).double()], num_stages=1, num_microbatches=2)
    with pytest.warns(UserWarning, match=r"attribute 'log' of layer 0 \(Does\) changes in each forward"):
        pipeline.step(*mlp_batch(4), mse_loss)


class Later(Dense):
    """From the second step on a buffer changes behind torch's back, and the output goes by it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))
        self.has_begun = False

    def forward(self, x: Tensor) -> Tensor:
        if self.has_begun:
            self.scale.data.mul_(1.5)
        return super().forward(x) * self.scale


def test_what_begins_after_the_first_step_is_found_by_verify() -> None:
    layers = [layer.double() for layer in (Later(), Dense())]
    pipeline = Pipeline(layers, num_stages=2, num_microbatches=3)
    pipeline.verify(*mlp_batch(6), mse_loss)
    pipeline.step(*mlp_batch(6), mse_loss)
    layers[0].has_begun = True
    with pytest.raises((VerifyError, ActionError), match="gradient of 'linear|such as .* changes by .data"):
        pipeline.verify(*mlp_batch(6), mse_loss)


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_a_cache_of_parametrized_weights_is_not_used(num_microbatches: int) -> None:
    layers = [parametrizations.weight_norm(dense_linear()).double()]
    pipeline = Pipeline(layers, num_stages=1, num_microbatches=num_microbatches)
    with parametrize.cached():
        assert pipeline.verify(*mlp_batch(4), mse_loss) < 1e-12
        pipeline.step(*mlp_batch(4), mse_loss)
    assert all(p.grad is not None for p in layers[0].parameters())


class Through(nn.Module):
    """Remembers in a buffer how often it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, value: Any) -> Any:
        self.calls += 1
        return value


@pytest.mark.parametrize(("remat", "num_stages"), [("always", 3), ("never", 1)])
def test_a_step_goes_on_as_if_nobody_had_asked_verify(remat: str, num_stages: int) -> None:
    """Parameters, averages, buffers, gradients that add up, random numbers, the optimizer's own hooks."""
    runs = []
    for asks in (False, True):
        model = seeded(everything)
        model.insert(1, Through())
        pipeline = Pipeline(model, num_stages=num_stages, num_microbatches=3, remat=remat)
        counted: list[Tensor] = []
        next(model.parameters()).register_post_accumulate_grad_hook(counted.append)
        torch.manual_seed(7)
        for step in range(3):
            batch, target = everything_batch(7, seed=step)
            if asks:
                state = copy.deepcopy(model.state_dict())
                assert pipeline.verify(batch, target, cross_entropy) < 1e-12
                assert all(map(torch.equal, state.values(), model.state_dict().values()))
            pipeline.step(batch, target, cross_entropy)
            if step:
                for parameter in model.parameters():
                    parameter.data.add_(parameter.grad, alpha=-0.1)
        runs.append((pipeline, len(counted), torch.rand(3)))
    (plain, before, drawn), (asked, after, redrawn) = runs
    assert_own_gradients(asked, {name: p.grad for name, p in plain.named_parameters()})
    for name, value in plain.state_dict().items():
        assert torch.equal(value, asked.state_dict()[name]), name
    assert (before, asked.num_steps) == (after, plain.num_steps)
    assert torch.equal(drawn, redrawn)


def test_two_threads_in_one_pipeline() -> None:
    inside, go_on = threading.Event(), threading.Event()

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        inside.set()
        assert go_on.wait(20)
        return mse_loss(output, target)

    pipeline = Pipeline([dense_linear().double()], num_stages=1, num_microbatches=1, remat="never")
    other = threading.Thread(target=pipeline.step, args=(*mlp_batch(4), loss_fn))
    other.start()
    assert inside.wait(20)
    with pytest.raises(RuntimeError, match="in the middle of a step"):
        pipeline.step(*mlp_batch(4), mse_loss)
    go_on.set()
    other.join()
    assert pipeline.step(*mlp_batch(4), mse_loss).isfinite()
