"""Trainable parameters in closed form, for tests to hold the counted parameters of built models against.

Derived in the paper's symbols from the layers' definitions, independently of the code that builds them.
"""


def transformer_lm_parameters(
    num_layers: int, *, d_model: int = 2048, ffn_dim: int = 8192, vocab_size: int = 32_000
) -> int:
    """Transformer-L: L (4 d^2 + 4 d + 2 d f + f + d + 4 d) + 2 V d + V.

    Per layer four attention matrices with biases, two feed-forward matrices with biases and two
    normalizations; outside an embedding, an untied softmax matrix and its bias.
    """
    d, f, V = d_model, ffn_dim, vocab_size
    return num_layers * (4 * d * d + 4 * d + 2 * d * f + f + d + 4 * d) + 2 * V * d + V


def transformer_seq2seq_parameters(
    num_layers: int,
    ffn_dim: int,
    num_heads: int,
    *,
    d_model: int = 1024,
    head_dim: int = 64,
    vocab_size: int = 64_000,
    num_tables: int = 2,
) -> int:
    """T(L, H, A) with attention channels a = head_dim * A: L (encoder + decoder layer) + t V d + V.

    An encoder layer has 4 d a + 3 a + d + 2 d H + H + d + 4 d, a decoder layer 4 d a + 3 a + d + 2 d more
    for the attention over the encoder's result; t is `num_tables`.
    """
    d, H, V, a = d_model, ffn_dim, vocab_size, num_heads * head_dim
    cross = 4 * d * a + 3 * a + d + 2 * d
    encoder = 4 * d * a + 3 * a + d + 2 * d * H + H + d + 4 * d
    return num_layers * (2 * encoder + cross) + num_tables * V * d + V


def amoebanet_d_layers(num_layers: int, num_filters: int, num_classes: int, preset: str = "tf") -> list[int]:
    """AmoebaNet-D (L, D) without auxiliary head, layer by layer: stem, two stem cells, cells, classifier.

    A cell of width F with a input and b previous channels has (a + b) F + 5.75 F^2 + 17 F (normal) or
    (a + b) F + 3.4375 F^2 + 12.5 F (reduction). D has to be divisible by 16, else the quarters are
    rounded.
    """
    D = num_filters
    if num_layers < 1 or D < 16 or D % 16:
        raise ValueError(
            f"AmoebaNet-D ({num_layers}, {D}) has no closed form here: it needs at least one layer and a "
            "multiple of 16 filters; count a built model instead"
        )

    def normal(width: int, a: int, b: int) -> int:
        return (a + b) * width + 23 * width * width // 4 + 17 * width

    def reduction(width: int, a: int, b: int) -> int:
        return (a + b) * width + 55 * width * width // 16 + 25 * width // 2

    if preset == "tf":
        stem, F = 32, D // 4
        # The first cell takes the stem's 32 channels for its previous input as they are: no 1x1 with
        # normalization there, but one after the strided maximum, and its 3x3 bottleneck starts from 32
        # channels instead of F.
        first = reduction(F, stem, 0) - 2 * F + (32 - F) * F // 4 + (34 * F if F != 32 else 0)
    elif preset == "torchgpipe":
        stem, F = D // 4, D // 2
        first = reduction(F, stem, stem)
    else:
        raise ValueError(f"unknown preset {preset!r}: choose 'tf' or 'torchgpipe'")
    counts = [27 * stem + 2 * stem, first, reduction(2 * F, 3 * F, stem)]
    F, a, b = D, 6 * F, 3 * F
    for i in range(num_layers):
        if i in (int(1 / 3 * num_layers), int(2 / 3 * num_layers)):
            F *= 2
            counts.append(reduction(F, a, b))
            a, b = 3 * F, a
        counts.append(normal(F, a, b))
        a, b = 4 * F, a
    return [*counts, a * num_classes + num_classes]
