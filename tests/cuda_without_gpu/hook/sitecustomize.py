"""Read by Python when it starts over the runtime without a device: what torch's own functions need there.

torch does without cuDNN: its interface hands out descriptions of plans that torch looks into; a function that
returns 0 is not enough. Without it torch convolves by matrix products, whose workspaces are others.

Objects go through the default store: torch sends them as bytes of tensors, whose number the receiver adds up
on its device, where kernels compute nothing.

The engine compares sums of a forward and its recomputation in its first step. Of numbers that no kernel has
written all sums are 0 here.
"""

import importlib.abc
import importlib.util
import sys


def without_cudnn(_):
    import torch._C

    torch._C._set_cudnn_enabled(False)
    torch._C._set_sdp_use_cudnn(False)


def objects_through_the_store(c10d):
    import pickle
    from collections import Counter

    passed = Counter()

    def key(group, source, target):
        group = c10d._group_or_default_group(group)
        pair = f"objects of {group.group_name} from {source} to {target}"
        passed[pair] += 1
        return f"{pair}, {passed[pair]}"

    def rank_of(group, rank, group_rank):
        group = c10d._group_or_default_group(group)
        return c10d.get_global_rank(group, group_rank) if rank is None else rank

    def send_object_list(object_list, dst=None, group=None, device=None, group_dst=None, use_batch=False):
        name = key(group, c10d.get_rank(), rank_of(group, dst, group_dst))
        c10d._get_default_store().set(name, pickle.dumps(list(object_list)))

    def recv_object_list(object_list, src=None, group=None, device=None, group_src=None, use_batch=False):
        source = rank_of(group, src, group_src)
        name = key(group, source, c10d.get_rank())
        object_list[:] = pickle.loads(c10d._get_default_store().get(name))
        return source

    c10d.send_object_list, c10d.recv_object_list = send_object_list, recv_object_list


def sums_of_nothing(first_step):
    def sums(tensors):
        return tuple((0.0, 0.0) for tensor in tensors if first_step._has_values(tensor))

    first_step.sums = sums


CHANGED = {
    "gpipe_bench.pipeline.stage.first_step": sums_of_nothing,
    "torch.backends.cudnn": without_cudnn,
    "torch.distributed.distributed_c10d": objects_through_the_store,
}


class Changing(importlib.abc.MetaPathFinder):
    """Finds each of these modules once, and changes it when it has been read."""

    def find_spec(self, name, path, target=None):
        change = CHANGED.pop(name, None)
        if change is None:
            return None
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            change(module)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Changing())
