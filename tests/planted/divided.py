"""Parameters divided over processes: what no error tells of, but a test does."""

from __future__ import annotations

from planted.mutant import Mutant

CASE = "tests/test_sharding.py::test_case"

DIVIDED = (
    Mutant(
        name="gathered parameters outlive an evaluation",
        file="pipeline/mesh/sharding.py",
        old="""\
    def evaluated(self) -> None:
        for layer in self._layers:
            layer.conclude()
""",
        new="""\
    def evaluated(self) -> None:
        pass
""",
        why="the step after an optimizer's would use the weights from before it",
        tests=(f"{CASE}[training_goes_on_after_evaluation]",),
    ),
    Mutant(
        name="gradients of shards are averaged",
        file="pipeline/mesh/sharding.py",
        old="        module.set_gradient_divide_factor(1.0)\n",
        new="",
        why="a share of the loss counts the examples of all replicas, so their gradients are summed",
        tests=(f"{CASE}[gradients_of_shards]",),
    ),
    Mutant(
        name="W leaves its gradients where nobody sums them",
        file="pipeline/mesh/sharding.py",
        old="        if last and self._zero == 2:\n",
        new="        if last and self._zero == 2 and kind is Kind.B:\n",
        why="no hook of torch's ends a W, so that parameters would have no gradients at all",
        tests=(f"{CASE}[gradients_of_shards]",),
    ),
    Mutant(
        name="a layer meets the views of torch's hook",
        file="pipeline/mesh/sharding.py",
        old="            layer.register_forward_pre_hook(around.enter)\n",
        new="",
        why="a view has other strides, and masks follow them: a recomputation would drop other elements",
        tests=(f"{CASE}[gradients_of_shards]",),
    ),
    Mutant(
        name="sums of gradients are not waited for",
        file="pipeline/mesh/sharding.py",
        old="            layer.sums.finish()\n",
        new="            layer.sums.forget()\n",
        why="the optimizer would read a sum that is still coming in",
        tests=("tests/test_sharding_parts.py::test_a_sum_under_way_is_waited_for",),
    ),
    Mutant(
        name="the head count of the whole layer is taken",
        file="pipeline/mesh/tensor_parallel.py",
        old="    if not heads or not columns:\n",
        new="    if heads or not columns:\n",
        why="`view(..., -1)` makes other heads of the same channels, without an error",
        tests=(f"{CASE}[layers_that_compute_something_else_are_refused]",),
    ),
    Mutant(
        name="heads are not divided by the plan",
        file="models/parallel.py",
        old="        module.num_heads //= mesh.size()\n",
        new="        pass\n",
        why="a block would look for heads that other ranks have",
        tests=(f"{CASE}[gradients_of_divided_layers]",),
    ),
    Mutant(
        name="all shards draw one mask",
        file="models/transformer/draws.py",
        old="(common + (shard + 1) * _APART)",
        new="common",
        why="the heads and hidden units of different ranks would be dropped alike",
        tests=(f"{CASE}[masks_of_divided_layers]",),
    ),
    Mutant(
        name="the residual's mask differs between ranks that hold it together",
        file="models/parallel.py",
        old="between=rank if sequence else None",
        new="between=rank",
        why="ranks would go on with different tensors that all take for the same",
        tests=(f"{CASE}[masks_of_divided_layers]",),
    ),
    Mutant(
        name="a norm counts this rank's part only",
        file="pipeline/mesh/gradients.py",
        old="            mine = _together(torch.stack(parts), norm_type)\n",
        new="            mine = _together(torch.stack(parts[:1]), norm_type)\n",
        why="gradients would be clipped by the norm of one part",
        tests=(f"{CASE}[norms_of_parts]",),
    ),
)
