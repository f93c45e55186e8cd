"""AmoebaNet (L, D): cells, operations and genotypes as a sequence of layers."""
