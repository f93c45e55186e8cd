"""Bytes: storages of a layer followed from birth to death, peaks of a stage, and cuts under a cap."""
