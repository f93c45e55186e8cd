"""Predictions of the paper's tables for its own accelerators."""

CONSTANT = "throughput without pipelining, over the accelerators"
SENTENCES: dict[str, dict[tuple[str, str], tuple[int, float]]] = {
    "table2-amoebanet": {
        (CONSTANT, "AmoebaNet-D (18, 256): K=8 / K=2, M=1"): (1, 1.0),
        ("AmoebaNet-D: share of a linear speed-up", "K=8 over K=2, M=32"): (32, 4.0),
    },
    "table2-transformer": {
        (CONSTANT, "Transformer-48: K=8 / K=2, M=1"): (1, 1.0),
        ("Transformer-48: speed-up with four times the accelerators", "K=8 / K=2, M=32"): (32, 1.0),
        ("Transformer-48: share of a linear speed-up at M >> K", "K=8 over K=2, M=32"): (32, 4.0),
    },
}
"""What the text says of Table 2, predicted and run here alike: by the row and column of a sentence, M and the
divisor of its number, which is throughput with 8 stages over that with 2.
"""
