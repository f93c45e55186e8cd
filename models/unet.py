"""torchgpipe's U-Net as a flat sequence of layers, so that a stage may begin anywhere.

A simplified U-Net of five levels: B convolutions on each level, C channels on the first and twice as many on
each further one. Layers pass activations and the skips of all levels above, the innermost first; or each skip
is a portal, which no layer between has to pass on. torchgpipe's published partitions count the same layers:
241 for (B, C) = (5, 64).
"""

from collections import Counter, OrderedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpipe_bench.models import checks

State = Tensor | tuple[Tensor, ...]


class OnActivations(nn.Module):
    """Applies `module` to the activations and passes the skips on."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, state: State) -> State:
        if isinstance(state, Tensor):
            result: Tensor = self.module(state)
            return result
        return self.module(state[0]), *state[1:]


class Stash(nn.Module):
    """x -> (x, x): the activations become the innermost skip too; nothing is copied.

    With a `portal`, a name, the second x goes to the `Join` of that name.
    """

    def __init__(self, portal: str | None = None) -> None:
        super().__init__()
        self.stashes = () if portal is None else (portal,)

    def forward(self, state: State) -> State:
        return (state, state) if isinstance(state, Tensor) else (state[0], *state)


class Join(nn.Module):
    """(x, skip, ...) -> x and the skip concatenated by channels, x padded to the skip's size if that is odd.

    With a `portal` the skip comes from the `Stash` of that name.
    """

    def __init__(self, portal: str | None = None) -> None:
        super().__init__()
        self.pops = () if portal is None else (portal,)

    def forward(self, state: tuple[Tensor, ...]) -> State:
        x, skip, *rest = state
        missing = [of_skip - of_x for of_x, of_skip in zip(x.shape[2:], skip.shape[2:], strict=True)]
        if any(missing):
            x = F.pad(x, [0, missing[1], 0, missing[0]])
        joined = torch.cat((x, skip), dim=1)
        return (joined, *rest) if rest else joined


class WithPortals(nn.Sequential):
    """Runs the layers one after another; each gets the portals that it pops."""

    def forward(self, images: Tensor) -> Tensor:
        state: State = images
        skips: dict[str, Tensor] = {}
        left = Counter(name for layer in self for name in getattr(layer, "pops", ()))
        for layer in self:
            pops, stashes = getattr(layer, "pops", ()), getattr(layer, "stashes", ())
            if pops:
                assert isinstance(state, Tensor)
                left.subtract(pops)
                state = (state, *[skips[name] if left[name] else skips.pop(name) for name in pops])
            state = layer(state)
            if stashes:
                state, *given = state
                skips.update(zip(stashes, given, strict=True))
        assert isinstance(state, Tensor)
        return state


def unet(
    *,
    num_convs: int = 5,
    num_filters: int = 64,
    depth: int = 5,
    dropout: float = 0.1,
    image_size: int = 192,
    input_channels: int = 3,
    output_channels: int = 1,
    portals: bool = False,
) -> nn.Sequential:
    """Builds a U-Net: images (N, 3, S, S) -> logits of each pixel (N, 1, S, S).

    Args:
        num_convs: B, convolutions on each level, down and up.
        num_filters: C, channels of the first level.
        depth: levels with a skip.
        dropout: dropout of channels behind each convolution.
        image_size: S in pixels, the size of the example batches; the network takes any of at least 2^depth.
        input_channels, output_channels: of the images and of the result.
        portals: whether skips are portals, which pass by the layers between their ends.

    Raises:
        ValueError: an option is out of range.
    """
    num_convs = checks.positive_int("num_convs", num_convs)
    num_filters = checks.even_int("num_filters", num_filters)
    depth = checks.positive_int("depth", depth)
    checks.probability("dropout", dropout)
    checks.positive_int("image_size", image_size)
    checks.positive_int("input_channels", input_channels)
    checks.positive_int("output_channels", output_channels)
    layers: OrderedDict[str, nn.Module] = OrderedDict()

    def level(name: str, channels: int, hidden: int, out: int) -> None:
        widths = [channels, *[hidden] * (num_convs - 1), out]
        for i in range(num_convs):
            block = {
                "conv": nn.Conv2d(widths[i], widths[i + 1], 3, padding=1, bias=False),
                "dropout": nn.Dropout2d(dropout),
                "norm": nn.InstanceNorm2d(widths[i + 1]),
                "relu": nn.LeakyReLU(0.01),
            }
            layers.update({f"{name}_{i}_{part}": OnActivations(module) for part, module in block.items()})

    channels = input_channels
    for i in range(depth):
        level(f"down{i}", channels, num_filters << i, num_filters << i)
        channels = num_filters << i
        layers[f"down{i}_stash"] = Stash(f"skip{i}" if portals else None)
        layers[f"down{i}_pool"] = OnActivations(nn.MaxPool2d(2))
    level("bottom", channels, 2 * channels, channels)
    for i in reversed(range(depth)):
        layers[f"up{i}_scale"] = OnActivations(nn.Upsample(scale_factor=2))
        layers[f"up{i}_join"] = Join(f"skip{i}" if portals else None)
        level(f"up{i}", 2 * (num_filters << i), (num_filters << i) // 2, (num_filters << i) // 2)
    layers["segment"] = nn.Conv2d(num_filters // 2, output_channels, 1, bias=False)
    return WithPortals(layers) if portals else nn.Sequential(layers)
