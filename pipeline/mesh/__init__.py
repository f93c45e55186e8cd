"""Grids of processes: data, sharded-data and tensor parallelism beside pipelines."""
