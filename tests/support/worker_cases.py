"""Workers that hold several stages, and schedules that are measured first: the bits of one process."""

from __future__ import annotations

import itertools
from contextlib import contextmanager
from datetime import timedelta
from unittest import mock

import torch
from ranks import TIMEOUT_S, halves
from tiny_models import EXACT, assert_own_gradients, everything, everything_batch, plain_step, seeded
from torch import distributed as dist
from torch import nn

from gpipe_bench.pipeline import Pipeline, named
from gpipe_bench.pipeline.ranks import ends

cross_entropy = nn.functional.cross_entropy


def several_stages_per_worker() -> None:
    """Both ways between two ranks, with rings as small as they get, and the bits of one process."""
    batch, target = everything_batch(11)
    plain = plain_step(seeded(everything), batch, target, cross_entropy, 7)
    for (name, remat), share_memory in itertools.product(
        (("interleaved", "never"), ("zb-v", "always"), ("v-min", "except_last")), (True, False)
    ):
        schedule, group = named(name, 2, 7, remat=remat), halves().group
        with mock.patch.object(ends, "SMALL_BYTES", 0):
            pipelines = [
                Pipeline(
                    seeded(everything),
                    num_stages=4,
                    num_microbatches=7,
                    schedule=schedule,
                    cost=[1] * 12,
                    group=place,
                    timeout_s=TIMEOUT_S,
                    share_memory=share_memory,
                )
                for place in (group, None)
            ]
            has = {stage.index for stage in pipelines[0].stages}
            own = (batch if 0 in has else None, target if 3 in has else None)
            for step in range(3):
                losses = [
                    pipeline.step(*data, cross_entropy)
                    for pipeline, data in zip(pipelines, (own, (batch, target)), strict=True)
                ]
                if step == 0:
                    assert_own_gradients(pipelines[0], plain.gradients, **EXACT)
            assert torch.equal(*losses)
            assert torch.equal(*[pipeline.clip_grad_norm_(1e-3) for pipeline in pipelines])
            alone = {name: parameter.grad for name, parameter in pipelines[1].named_parameters()}
            assert_own_gradients(pipelines[0], alone)  # three steps added up, to the bit
            timeline = pipelines[0].gather_timeline()
            assert timeline.placement == schedule.placement
            assert {e.action for e in timeline.events} == set(schedule)
            for pipeline in pipelines:
                pipeline.eval()
            output, wanted = pipelines[0](own[0]), pipelines[1](batch)
            assert (output is None) == (3 not in has)
            assert output is None or torch.equal(output, wanted)


def the_loss_is_told_before_the_last_weights() -> None:
    """In a V the rank of the loss has the longest row; here it takes its last action only after the other
    one's step has returned.
    """
    batch, target = everything_batch(6)
    for share_memory in (True, False):
        pair = halves()
        pipeline = Pipeline(
            seeded(everything),
            num_stages=4,
            num_microbatches=2,
            schedule="zb-v",
            remat="never",
            cost=[1] * 12,
            group=pair.group,
            timeout_s=TIMEOUT_S,
            share_memory=share_memory,
        )
        last_action = pipeline.schedule.actions[0][-1]
        other, word = dist.get_global_rank(pair.group, 1 - pair.rank), torch.zeros(1)
        has_returned = dist.irecv(word, other) if pair.is_first else None

        @contextmanager
        def observe(action, last_action=last_action, has_returned=has_returned):
            if action == last_action:
                has_returned.wait(timedelta(seconds=TIMEOUT_S))
            yield

        own = (batch, target) if pair.is_first else (None, None)
        pipeline.step(*own, cross_entropy)  # the ranks agree on what travels
        if pair.is_first:
            pipeline.step(*own, cross_entropy, observe=observe)
        else:
            pipeline.step(*own, cross_entropy)
            dist.send(word, other)


CASES = (
    several_stages_per_worker,
    the_loss_is_told_before_the_last_weights,
)
