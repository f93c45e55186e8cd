"""The published tables in words: those that experiments answer say so themselves, the others stand here.

A cell that nobody ran must say why; "not run" alone would look like an oversight where the reason is a
thousand TPU hours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gpipe_bench.harness.experiment import Experiment
from gpipe_bench.harness.report.page import TableInfo

_TRAINING = (
    "needs ImageNet at 480x480 and weeks of accelerators; the model itself is in the zoo and its parameters "
    "can be counted with `python -m experiments list --models`"
)
_NMT = "needs the authors' private corpus of 25 billion sentence pairs"
_TEXT = "no experiment reports it yet; the row says what an answer would take"

NOT_TO_BE_RUN: dict[str, TableInfo] = {
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
    "amoebanet-b": TableInfo(
        title="AmoebaNet-B (18, 512): the 557-million-parameter image model",
        short="AmoebaNet-B on ImageNet",
        about="The paper's largest image classifier.",
        missing=_TRAINING,
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
}
"""Published tables that no experiment answers, by the name of paper.csv, with the reason."""


def table_infos(experiments: Sequence[Experiment], profiles: Mapping[str, set[str]]) -> dict[str, TableInfo]:
    """The published tables in words, with the reason for cells that no record answers: in the order
    of the experiments, then those that none answers.

    `profiles` are those that each experiment has records of.
    """
    infos = {
        name: TableInfo(
            title=table.title,
            short=table.short,
            about=table.about,
            experiment=experiment.name,
            missing=_why(experiment.name, profiles.get(experiment.name, set())),
        )
        for experiment in experiments
        for name, table in experiment.paper_tables.items()
    }
    return infos | NOT_TO_BE_RUN


def _why(experiment: str, profiles: set[str]) -> str:
    if not profiles:
        return f"there is no record yet; `nox -s {experiment}` makes one"
    if profiles == {"smoke"}:
        return f"only a smoke run is on record; `nox -s {experiment}` makes this number"
    return f"the records of {experiment} do not report this number"
