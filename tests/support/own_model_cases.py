"""Models that are no sequences, over processes; cases of `test_distributed`."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from own_graphs import CASES as MODELS
from own_models import FAMILIES
from ranks import Ranks, halves
from tiny_models import assert_own_gradients
from torch import Tensor, nn
from torch import distributed as dist

from gpipe_bench.pipeline import Pipeline, checkpoint, layers_of, split

NEED_TRANSFORMERS = {"models_of_transformers_over_two_processes"}


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


class Tied(nn.Module):
    """A model whose output layer has the embedding's weight, and which uses a layer twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.first = nn.Embedding(7, 4), nn.Linear(4, 4)
        self.second, self.output = nn.Linear(4, 4), nn.Linear(4, 7)
        self.output.weight = self.embedding.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.first(self.embedding(words)).tanh()
        return self.output(self.first(self.second(x)).tanh())


def a_checkpoint_of_tied_weights_of_a_model_cut_by_its_graph() -> None:
    """Written and read by any number of processes: a tied weight is one entry, by the model's first name."""
    ranks = Ranks()
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    words, target = torch.randint(7, (2, 6), generator=torch.Generator().manual_seed(1))

    def built(group: Ranks | None) -> tuple[Pipeline, torch.optim.Optimizer]:
        layers = split(Tied(), ["first", "second", "output"])
        options = {"schedule": "1f1b", "seed": 3}
        pipeline = (
            Pipeline(layers, num_stages=1, num_microbatches=1, **options)
            if group is None
            else group.pipeline(layers, 1, **options)
        )
        return pipeline, torch.optim.SGD(pipeline.parameters(), lr=0.1, momentum=0.9)

    def train(pipeline: Pipeline, optimizer: torch.optim.Optimizer) -> None:
        own = (words, target) if pipeline.group is None else ranks.own(words, target)
        pipeline.step(*own, F.cross_entropy)
        optimizer.step()
        optimizer.zero_grad()

    alone, over_processes = built(None), built(ranks)
    for run, name in ((alone, "one"), (over_processes, "four")):
        train(*run)
        if name == "four" or ranks.is_first:
            checkpoint.save(Path(folder[0]) / name, *run)
    train(*alone)
    dist.barrier()
    for name in ("one", "four"):
        for run in (built(None), built(ranks)):
            checkpoint.load(Path(folder[0]) / name, *run)
            train(*run)
            for key, value in run[0].state_dict().items():
                torch.testing.assert_close(value, alone[0].state_dict()[key], msg=f"{name}: {key}")


WAYS = (("1f1b", "always"), ("1f1b", "never"), ("zb-h1", "always"), ("zb-h1", "never"))


def models_of_transformers_over_two_processes() -> None:
    """Every gradient is what the library's own forward and backward give, with tied weights where it ties
    them.
    """
    pair = halves()
    for name, family in FAMILIES.items():
        model = family.model(tied=family.tied)
        batch = family.batch()
        logits = model(**dict(zip(family.inputs, batch, strict=True))).logits
        target = torch.randint(
            logits.shape[-1], logits.shape[:-1], generator=torch.Generator().manual_seed(2)
        )

        def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
            return F.cross_entropy(logits.flatten(0, -2), target.flatten())

        loss_fn(logits, target).backward()
        wanted = {key: p.grad for key, p in model.named_parameters(remove_duplicate=False)}
        scale = max(float(gradient.abs().max()) for gradient in wanted.values() if gradient is not None)
        for schedule, remat in WAYS:
            layers = layers_of(family.model(tied=family.tied), family.inputs)
            pipeline = pair.pipeline(layers, 4, schedule=schedule, remat=remat, cost=None)
            pipeline.step(*pair.own(batch if len(batch) > 1 else batch[0], target), loss_fn)
            for key, parameter in pipeline.named_parameters():
                error = (parameter.grad - wanted[key]).abs().max()
                assert error <= 1e-12 * scale, (name, schedule, remat, key)


CASES = (
    models_of_transformers_over_two_processes,
    a_model_cut_by_its_graph,
    a_checkpoint_of_tied_weights_of_a_model_cut_by_its_graph,
)
