"""AmoebaNet (L, D) as a sequence of layers: cells, operations and genotypes."""
