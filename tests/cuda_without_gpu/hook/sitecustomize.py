"""Read by Python when it starts over the runtime without a device: torch does without cuDNN.

cuDNN's interface hands out descriptions of plans that torch looks into; a function that returns 0 is not
enough. Without it torch convolves by matrix products of its own, whose workspaces are others.
"""

import importlib.abc
import importlib.util
import sys

NAME = "torch.backends.cudnn"


class WithoutCudnn(importlib.abc.MetaPathFinder):
    """Finds the module once, and switches cuDNN off behind it."""

    def find_spec(self, name, path, target=None):
        if name != NAME:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            import torch._C

            torch._C._set_cudnn_enabled(False)
            torch._C._set_sdp_use_cudnn(False)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, WithoutCudnn())
