"""Runs a script beside a torchvision that was built for another torch: `with_torchvision.py SCRIPT ...`."""

from __future__ import annotations

import runpy
import sys

from gpipe_bench.models.torchvision_shim import import_torchvision

import_torchvision()
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
