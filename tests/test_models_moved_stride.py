"""AmoebaNet of the stride control: the map is kept large at the first convolution and halved at the end."""

from __future__ import annotations

import pytest
import torch

from gpipe_bench.models import MODELS, count_parameters
from gpipe_bench.models.amoebanet.network import MOVED_STRIDES


def sides(moved_stride: str | None, image_size: int = 65, **options: object) -> dict[str, int]:
    """Side of the map behind every layer but the classifier, from a real forward."""
    given = {"num_layers": 6, "num_filters": 8, "stem_filters": 4, "aux_head": False, "num_classes": 2}
    torch.manual_seed(0)
    model = MODELS["amoebanet-d"](**given | options, image_size=image_size, moved_stride=moved_stride)
    value = torch.randn(2, 3, image_size, image_size)
    found = {}
    for name, layer in model.named_children():
        value = layer(value)
        first = value[0] if isinstance(value, tuple) else value
        if first.dim() == 4:
            found[name] = first.size(2)
    assert value.shape == (2, 2)
    return found


@pytest.mark.parametrize("image_size", [65, 66])
def test_maps_have_twice_the_side_up_to_the_layer_that_the_stride_moves_to(image_size: int) -> None:
    original = sides(None, image_size)
    for moved, last in zip(MOVED_STRIDES, ("reduction_1", "normal_5"), strict=True):
        found = sides(moved, image_size)
        assert list(found) == list(original)
        at = list(found).index(last)
        for place, (name, side) in enumerate(found.items()):
            if place >= at:
                assert side == original[name], name
            else:
                assert abs(side - 2 * original[name]) <= 2, name


def test_no_stride_is_moved_by_default() -> None:
    model = MODELS["amoebanet-d"](num_layers=3, num_filters=8)
    assert model.stem.conv.stride == (2, 2)
    cells = {name: cell for name, cell in model.named_children() if "_" in name}
    assert cells["reduction_1"].ops[0][0].stride == 2


def test_the_size_of_the_model_stays_where_no_layer_gets_a_stride_that_had_none() -> None:
    """The reduction cell has strided layers already; a normal cell's identities become convolutions."""
    with torch.device("meta"):
        counts = {
            moved: count_parameters(
                MODELS["amoebanet-d"](num_layers=6, num_filters=256, aux_head=False, moved_stride=moved)
            )
            for moved in (None, *MOVED_STRIDES)
        }
    assert counts["second reduction cell"] == counts[None]
    assert counts["last normal cell"] > counts[None]


def test_a_training_step_reaches_every_parameter() -> None:
    for moved in MOVED_STRIDES:
        model = MODELS["amoebanet-d"](
            num_layers=3, num_filters=8, stem_filters=4, image_size=67, num_classes=2, moved_stride=moved
        )
        logits, auxiliary = model(torch.randn(2, 3, 67, 67))
        (logits.sum() + auxiliary.sum()).backward()
        assert all(p.grad is not None for p in model.parameters())
