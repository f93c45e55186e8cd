"""Models that are no sequences, over processes; cases of `test_distributed`."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from own_graphs import CASES as MODELS
from ranks import Ranks, assert_own_gradients
from torch import distributed as dist

from gpipe_bench.pipeline import Pipeline, checkpoint, split


def a_model_cut_by_its_graph() -> None:
    """Each rank has what its layers use, by the model's names; the bits are those of one process, also behind
    a checkpoint.
    """
    ranks = Ranks()
    for case in MODELS.values():
        alone_model = case.model(dtype=torch.float32)
        batch, target = case.data(torch.float32)
        alone = Pipeline(split(alone_model, case.at), num_stages=1, num_microbatches=4, schedule="1f1b")
        pipeline = ranks.pipeline(split(case.model(dtype=torch.float32), case.at), schedule="1f1b")
        alone.step(batch, target, case.loss)
        pipeline.step(*ranks.own(batch, target), case.loss)
        assert_own_gradients(pipeline, {name: p.grad for name, p in alone_model.named_parameters()})
        assert torch.equal(alone.clip_grad_norm_(0.1), pipeline.clip_grad_norm_(0.1))
        names = pipeline.gather(list(pipeline.state_dict()))
        assert set().union(*names) == set(alone_model.state_dict())
        assert len(names[ranks.rank]) < len(alone_model.state_dict())
        for key, value in pipeline.state_dict().items():
            assert torch.equal(value, alone_model.state_dict()[key]), key


def a_checkpoint_of_a_model_cut_by_its_graph() -> None:
    ranks = Ranks()
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    case = MODELS["residual"]
    batch, target = case.data()
    pipeline = ranks.pipeline(split(case.model(), case.at))
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1, momentum=0.9)
    pipeline.step(*ranks.own(batch, target), case.loss)
    optimizer.step()
    checkpoint.save(Path(folder[0]), pipeline, optimizer)
    alone = Pipeline(split(case.model(), case.at), num_stages=2, num_microbatches=4)
    checkpoint.load(Path(folder[0]), alone, torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9))
    for key, value in pipeline.state_dict().items():
        assert torch.equal(value, alone.state_dict()[key]), key


CASES = (a_model_cut_by_its_graph, a_checkpoint_of_a_model_cut_by_its_graph)
