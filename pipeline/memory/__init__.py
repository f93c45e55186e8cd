"""Predicts peak memory from traces of each layer's storages: of stages, workers and partitions."""
