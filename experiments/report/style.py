"""How plots look: one theme, entered while one is drawn and left again, so that none changes another."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paper_style(font_scale: float = 1.0) -> Iterator[None]:
    """White with a grid, in sizes for a page."""
    import seaborn

    with seaborn.axes_style("whitegrid"), seaborn.plotting_context("paper", font_scale=font_scale):
        yield
