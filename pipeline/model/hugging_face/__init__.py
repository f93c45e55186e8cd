"""Families of models of `transformers`, taken apart by their module structure.

Each file says what a family's own forward does between its modules, once, as layers; the modules' forwards
are the library's. Nothing here imports `transformers` before a model of it is given.
"""
