"""Whether a pipeline engine trains right, as tests of somebody else's engine: `pytest --pyargs
gpipe_bench.conformance --engine module:attribute` (docs/own-engine.md).
"""
