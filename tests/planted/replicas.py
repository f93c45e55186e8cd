"""What replicas of a pipeline do together, wrongly: shares, sums, their moment and their order."""

from __future__ import annotations

from planted.mutant import Mutant

STEPS = ("tests/test_mesh.py::test_case[gradients_of_earlier_steps_count_once]",)

REPLICAS = (
    Mutant(
        name="shares of a replica's own batch",
        file="pipeline/mesh/collectives.py",
        old="            examples = int(self._examples)\n",
        new="            examples = sum(self._lengths)\n",
        why="a sum over replicas of means is no mean: too large by their number, or by more",
        tests=STEPS,
    ),
    Mutant(
        name="gradients of earlier steps counted by every replica",
        file="pipeline/mesh/reduce.py",
        old="        if self._collectives.replicas.rank and not self._own:\n",
        new="        if self._collectives.replicas.rank < 0:\n",
        why="they are sums already, and would be summed again in every step without zero_grad",
        tests=STEPS,
    ),
    Mutant(
        name="gradients of a replica's own forgotten",
        file="pipeline/mesh/reduce.py",
        old="            self._own = True\n",
        new="            self._own = False\n",
        why="steps without a sum would count of the first replica alone",
        tests=STEPS,
    ),
    Mutant(
        name="buckets leave within the first backward",
        file="pipeline/stage/stage.py",
        old="for a in reversed(row)",
        new="for a in row",
        why="what later micro-batches add would not be summed, and nothing else complains",
        tests=STEPS,
    ),
    Mutant(
        name="replicas draw the same",
        file="pipeline/stage/layers.py",
        old="generators.seed(mix(key ^ (self._first_microbatch + m)))",
        new="generators.seed(mix(key ^ m))",
        why="the dropout masks of replicas would be equal, which no gradient of one replica shows",
        tests=STEPS,
    ),
    Mutant(
        name="a gradient of another replica dropped",
        file="pipeline/mesh/reduce.py",
        old="                    if not mark:\n",
        new="                    if mark < self._collectives.replicas.size:\n",
        why="where the loss of one replica alone depends on a parameter, the replicas' weights would part",
        tests=("tests/test_mesh.py::test_case[parameters_without_a_gradient]",),
    ),
    Mutant(
        name="a tree that is no subtree of another's",
        file="pipeline/mesh/tree.py",
        old="            low, high = (start, (start + end) // 2), ((start + end) // 2, end)\n",
        new="            low, high = (start, start + 1), (start + 1, end)\n",
        why="sums would be grouped by who holds the micro-batches, so bits would depend on the grid",
        tests=("tests/test_halving.py::test_a_replica_has_a_subtree",),
    ),
    Mutant(
        name="the loss of one replica",
        file="pipeline/mesh/reduce.py",
        old="            of_all = collectives.sum(loss)\n",
        new="            of_all = collectives.sum(loss.clone())\n",
        why="what is shown would be a part of the mean over the batch",
        tests=STEPS,
    ),
    Mutant(
        name="parameters that come later stay as they are",
        file="pipeline/mesh/reduce.py",
        old="                self._collectives.copy_from_first([parameter.detach() for parameter in new])\n",
        new="                pass\n",
        why="replicas would train models that begin with different values",
        tests=("tests/test_mesh.py::test_case[parameters_that_come_later]",),
    ),
    Mutant(
        name="sums of the parameters of the step before",
        file="pipeline/mesh/reduce.py",
        old="            stage.look(loss_fn)\n",
        new="            stage.look(None)\n",
        why="the gradients of a loss that is a module would stay each replica's own",
        tests=("tests/test_mesh.py::test_case[parameters_that_come_later]",),
    ),
    Mutant(
        name="leaves of the graph not looked at",
        file="pipeline/stage/stage.py",
        old="                self._refuse_others(m)\n",
        new="                pass\n",
        why="a parameter in the closure of a loss would get each replica's own gradient",
        tests=("tests/test_mesh.py::test_case[parameters_that_nobody_would_sum]",),
    ),
)
