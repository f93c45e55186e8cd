"""Predictions of the paper's tables for its own accelerators."""

SENTENCES: dict[str, dict[tuple[str, str], tuple[int, float]]] = {
    "table2-amoebanet": {("AmoebaNet-D: share of a linear speed-up", "K=8 over K=2, M=32"): (32, 4.0)},
    "table2-transformer": {
        ("Transformer-48: speed-up with four times the accelerators", "K=8 / K=2, M=32"): (32, 1.0),
    },
}
"""Sentences on Table 2 beyond its cells, predicted and run here alike: by the row and column of a
sentence, M and the divisor of its number, which is throughput with 8 stages over that with 2. Sentences that
say of a cell in words what its number says are judged there.
"""
