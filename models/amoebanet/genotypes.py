"""The cells of AmoebaNet-A, B, C and D as data, in the notation of the architecture search.

One table per cell: five pairs `operation@state`, added pairwise, and the states that are concatenated.
State 0 is the cell's input after its 1x1 convolution, state 1 the output of the cell before after
matching, and states 2 to 6 are the five sums in order. (The published drawing of AmoebaNet-A has 0 and 1
interchanged; the code is right.)

Source: the TensorFlow reference of AmoebaNet. B's reduction cell names its 5x5 separable convolution as
dilated, but the reference's parser ignores the dilation, so it is a plain one here too.
"""

from dataclasses import dataclass

OPERATIONS = (
    "none", "1x1", "3x3", "1x7_7x1", "avg3", "max3", "max2", "sep3x3_2", "sep5x5_2", "sep7x7_2",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class CellPlan:
    """One cell: five pairs of `operation@state` and the states that make up its output."""

    pairs: tuple[tuple[str, str], ...]
    concat: tuple[int, ...]

    @property
    def operations(self) -> tuple[str, ...]:
        """The ten operations, left before right."""
        return tuple(item.split("@")[0] for pair in self.pairs for item in pair)

    @property
    def inputs(self) -> tuple[int, ...]:
        """The states which the ten operations read."""
        return tuple(int(item.split("@")[1]) for pair in self.pairs for item in pair)


@dataclass(frozen=True, slots=True)
class Genotype:
    """The two cells of one AmoebaNet."""

    normal: CellPlan
    reduction: CellPlan


GENOTYPES: dict[str, Genotype] = {
    "a": Genotype(
        normal=CellPlan(
            pairs=(
                ("avg3@0", "max3@0"),
                ("sep3x3_2@1", "none@1"),
                ("none@0", "avg3@1"),
                ("sep3x3_2@0", "sep5x5_2@2"),
                ("avg3@5", "sep3x3_2@0"),
            ),
            concat=(1, 3, 4, 6),
        ),
        reduction=CellPlan(
            pairs=(
                ("sep3x3_2@1", "avg3@0"),
                ("max3@0", "sep7x7_2@2"),
                ("max3@1", "max3@0"),
                ("sep3x3_2@4", "1x7_7x1@0"),
                ("avg3@1", "sep7x7_2@0"),
            ),
            concat=(2, 3, 4, 5, 6),
        ),
    ),
    "b": Genotype(
        normal=CellPlan(
            pairs=(
                ("1x1@1", "max3@1"),
                ("none@1", "sep3x3_2@0"),
                ("1x1@1", "sep3x3_2@0"),
                ("1x1@2", "none@2"),
                ("avg3@1", "1x1@5"),
            ),
            concat=(0, 3, 4, 6),
        ),
        reduction=CellPlan(
            pairs=(
                ("max2@0", "max3@0"),
                ("none@2", "3x3@1"),
                ("sep5x5_2@2", "max3@2"),
                ("none@3", "sep3x3_2@1"),
                ("avg3@4", "1x1@3"),
            ),
            concat=(5, 6),
        ),
    ),
    "c": Genotype(
        normal=CellPlan(
            pairs=(
                ("avg3@0", "sep3x3_2@0"),
                ("none@0", "sep3x3_2@0"),
                ("avg3@2", "sep3x3_2@1"),
                ("none@0", "sep3x3_2@1"),
                ("avg3@3", "sep3x3_2@0"),
            ),
            concat=(1, 2, 4, 5, 6),
        ),
        reduction=CellPlan(
            pairs=(
                ("max3@0", "max3@0"),
                ("sep7x7_2@2", "sep3x3_2@0"),
                ("sep7x7_2@0", "max3@1"),
                ("sep5x5_2@4", "sep5x5_2@4"),
                ("max3@1", "sep3x3_2@1"),
            ),
            concat=(0, 2, 3, 4, 5, 6),
        ),
    ),
    "d": Genotype(
        normal=CellPlan(
            pairs=(
                ("1x1@1", "max3@1"),
                ("none@1", "1x7_7x1@0"),
                ("1x1@0", "1x7_7x1@0"),
                ("max3@2", "none@2"),
                ("avg3@1", "1x1@5"),
            ),
            concat=(0, 3, 4, 6),
        ),
        reduction=CellPlan(
            pairs=(
                ("max2@0", "max3@0"),
                ("none@2", "3x3@1"),
                ("1x7_7x1@2", "max3@2"),
                ("none@3", "max2@1"),
                ("avg3@2", "1x1@3"),
            ),
            concat=(4, 5, 6),
        ),
    ),
}
