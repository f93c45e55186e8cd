"""The paper's tables in words, and why some of them have no number of ours.

A cell that nobody ran must say why; "not run" alone would look like an oversight where the reason is a
thousand TPU hours.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from gpipe_bench.experiments.registry import EXPERIMENTS
from gpipe_bench.harness.report.page import TableInfo

_TRAINING = (
    "needs ImageNet at 480x480 and weeks of accelerators; the model itself is in the zoo and its parameters "
    "can be counted with `python -m experiments list --models`"
)
_ACCURACY = "needs full ImageNet training, which says nothing about the pipeline that the gradients do not"
_NMT = "needs the authors' private corpus of 25 billion sentence pairs"
_TEXT = "no experiment reports it yet; the row says what an answer would take"
_OTHERS = "numbers of others that the paper prints; nothing here is held against them"
_PEER = "published by torchgpipe's authors; the paper has no such table, so nothing here is held against it"

TABLES: dict[str, TableInfo] = {
    "table1-amoebanet": TableInfo(
        title="Table 1, AmoebaNet-D: the largest model",
        short="Table 1, AmoebaNet-D",
        about="Parameters and memory of the paper's models, and the largest model that fits in 8 GiB each.",
        experiment="table1",
    ),
    "table1-transformer": TableInfo(
        title="Table 1, Transformer-L: the largest model",
        short="Table 1, Transformer",
        about="Parameters and memory of the paper's models, and the largest model that fits in 16 GiB each.",
        experiment="table1",
    ),
    "claims": TableInfo(
        title="Claims of the text: how much larger models become",
        short="Claims of model size",
        about="Ratios of Table 1's counts that the paper states in its text.",
        experiment="table1",
    ),
    "claims-text": TableInfo(
        title="Claims of the text: speed and overhead",
        short="Claims of speed",
        about="Sentences with a number or a direction on throughput, bubble, recomputation and links.",
        missing=_TEXT,
    ),
    "table1-v1": TableInfo(
        title="Table 1 of the first version: AmoebaNet-D",
        short="Table 1 of v1",
        about="The same models and numbers as v5's upper half, with normal cells counted per stack.",
        missing=_TEXT,
    ),
    "formulas": TableInfo(
        title="Figure 2 and the formulas of section 2",
        short="Formulas",
        about="Bubble fractions and activation memory by the paper's algebra and by replaying the schedule.",
        experiment="figure2",
    ),
    "table2-amoebanet": TableInfo(
        title="Table 2, AmoebaNet-D (18, 256): normalized throughput",
        short="Table 2, AmoebaNet-D",
        about="Training throughput over stages K and micro-batches M, relative to K=2, M=1.",
        experiment="table2",
    ),
    "table2-transformer": TableInfo(
        title="Table 2, Transformer-48: normalized throughput",
        short="Table 2, Transformer",
        about="Training throughput over stages K and micro-batches M, relative to K=2, M=1.",
        experiment="table2",
    ),
    "table2-bound": TableInfo(
        title="Table 2: what theory allows",
        short="Table 2, bound",
        about="The best any schedule that flushes can do with perfectly balanced stages and a free link.",
        experiment="table2",
    ),
    "table3-amoebanet": TableInfo(
        title="Table 3, AmoebaNet-D (18, 128): throughput over a slow link",
        short="Table 3, AmoebaNet-D",
        about="Throughput without a fast interconnect (PCIe), M=32, relative to K=2.",
        experiment="table3",
    ),
    "table3-transformer": TableInfo(
        title="Table 3, Transformer-24: throughput over a slow link",
        short="Table 3, Transformer",
        about="Throughput without a fast interconnect (PCIe), M=32, relative to K=2.",
        experiment="table3",
    ),
    "breakdown-v5": TableInfo(
        title="Table 4: where the time of a step goes",
        short="Time breakdown",
        about="Shares of a training step, each device-second attributed once.",
        experiment="table4",
    ),
    "breakdown-v1": TableInfo(
        title="Figure 4 of the first version: overheads of ResNet-101",
        short="Time breakdown, v1",
        about="Recomputation and load imbalance with two and four partitions.",
        experiment="table4",
    ),
    "figure3-amoebanet": TableInfo(
        title="Figure 3(a) of the first version: AmoebaNet-D (4, 512) speed-up",
        short="Figure 3, AmoebaNet-D",
        about="Throughput over partitions, relative to naive-2.",
        experiment="figure3",
    ),
    "figure3-resnet101": TableInfo(
        title="Figure 3(b) of the first version: ResNet-101 speed-up",
        short="Figure 3, ResNet-101",
        about="Throughput over partitions, relative to one device without re-materialization.",
        experiment="figure3",
    ),
    "consistency": TableInfo(
        title="Consistent training, section 4.3.1 of the first version",
        short="Consistent training",
        about="Whether the final accuracy depends on the number of partitions.",
        experiment="consistency",
    ),
    "amoebanet-b": TableInfo(
        title="AmoebaNet-B (18, 512): the 557-million-parameter image model",
        short="AmoebaNet-B on ImageNet",
        about="The paper's largest image classifier.",
        missing=_TRAINING,
    ),
    "control-stride": TableInfo(
        title="Control experiment: the stride of AmoebaNet-D (2, 256)",
        short="Stride control",
        about="Larger activations at the same number of parameters, first version, section 5.",
        missing=_ACCURACY,
    ),
    "imagenet-models": TableInfo(
        title="Table 2 of the first version: models on ImageNet",
        short="ImageNet models, v1",
        about="The 557M model beside those of others; AmoebaNet-C's count is a check of ours.",
        missing=_TRAINING,
    ),
    "transfer": TableInfo(
        title="Transfer of AmoebaNet-B to other image data sets",
        short="Transfer learning",
        about="Fine-tuning accuracy of the 557M model.",
        missing=_TRAINING,
    ),
    "nmt-models": TableInfo(
        title="Multilingual translation: sizes of the models",
        short="Translation, sizes",
        about="Parameters of the Transformers T(L, H, A) of section 5.",
        missing=(
            "no number of embedding tables (shared, two or three) gives all five printed counts, so that "
            "none is claimed; ours are listed by `python -m experiments list --models`"
        ),
    ),
    "nmt-corpus": TableInfo(
        title="Multilingual translation: corpus and quality",
        short="Translation, corpus",
        about="Languages, examples and what is said of the quality in section 5.",
        missing=_NMT,
    ),
    "nmt-batch": TableInfo(
        title="Table 5: translation quality over the batch size",
        short="Translation, batch size",
        about="BLEU and negative log-likelihood of Transformer Big, German to English.",
        missing=_NMT,
    ),
    "growth": TableInfo(
        title="Figure 1: how models have grown",
        short="Growth of models",
        about="Sizes, accuracies and accelerators that the introduction sets out from.",
        missing=_OTHERS,
    ),
    "write-ups": TableInfo(
        title="What others write about GPipe",
        short="Write-ups",
        about="Claims of web pages about GPipe; where they contradict the paper, the row says so.",
        missing="claims of others than the paper's authors; nothing here is held against them",
    ),
    "resnet101-accuracy": TableInfo(
        title="torchgpipe's ResNet-101 accuracy and throughput",
        short="torchgpipe, ResNet-101",
        about=_PEER,
        missing=_PEER,
    ),
}
"""By the name of paper.csv, in the order of the page. An experiment's name may be one that is not there."""


def table_infos(profiles: Mapping[str, set[str]]) -> dict[str, TableInfo]:
    """The tables with their reason for cells that no record answers.

    `profiles` are those that each experiment has records of.
    """
    return {name: dataclasses.replace(info, missing=_why(info, profiles)) for name, info in TABLES.items()}


def _why(info: TableInfo, profiles: Mapping[str, set[str]]) -> str:
    if info.missing:
        return info.missing
    if info.experiment not in EXPERIMENTS:
        return f"no experiment of this version reports it ({info.experiment} is not there)"
    on_record = profiles.get(info.experiment)
    if not on_record:
        return f"there is no record yet; `nox -s {info.experiment}` makes one"
    if on_record == {"smoke"}:
        return f"only a smoke run is on record; `nox -s {info.experiment}` makes this number"
    return f"the records of {info.experiment} do not report this number"
