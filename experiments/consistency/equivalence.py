"""Whether two means are the same within a margin, and how often a test of that finds what is true.

The margin is in standard deviations of the first group, which are estimated from the same few runs that make
its mean. So the distance follows a noncentral t, its interval is exact, and so is the power.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Word = Literal["reproduced", "undecided", "above"]


@dataclass(frozen=True)
class Distance:
    """Of two means, in standard deviations of one run, with the interval of the true one."""

    value: float
    low: float
    high: float

    def word(self, margin: float) -> Word:
        """Whether the interval lies within the margin, on both sides of its end, or outside."""
        if self.high <= margin:
            return "reproduced"
        return "undecided" if self.low <= margin else "above"


def interval(distance: float, runs: int, baseline_runs: int, alpha: float) -> tuple[float, float]:
    """The true distances that neither of two one-sided tests at `alpha` rejects; 0 stands for less than none.

    The exact interval of a standardized difference of means: the observed one follows a noncentral t, since
    the standard deviation is itself estimated, from the baseline's few runs.
    """
    from scipy.special import nctdtrinc

    scale, freedom = _scale(runs, baseline_runs), baseline_runs - 1
    # Centres of the distributions of which this much lies below what was observed.
    low, high = (float(nctdtrinc(freedom, share, distance / scale)) for share in (1 - alpha, alpha))
    return scale * max(0.0, low), scale * high


def farthest(runs: int, baseline_runs: int, margin: float, alpha: float) -> float:
    """The observed distance up to which the whole interval lies within the margin; negative if none does."""
    from scipy.special import nctdtrit

    scale = _scale(runs, baseline_runs)
    return scale * float(nctdtrit(baseline_runs - 1, margin / scale, alpha))


def power(runs: int, baseline_runs: int, margin: float, alpha: float) -> float:
    """How often one group is found equal that is equal."""
    from scipy.special import stdtr

    most = farthest(runs, baseline_runs, margin, alpha) / _scale(runs, baseline_runs)
    return max(0.0, float(2 * stdtr(baseline_runs - 1, most) - 1))


def joint_power(groups: int, runs: int, baseline_runs: int, margin: float, alpha: float) -> float:
    """How often all of several equal groups are found equal, which share a baseline.

    Given the baseline's mean and standard deviation they are independent; the midpoint rule over the
    probabilities of these two.
    """
    import numpy
    from scipy.special import chdtri, ndtr, ndtri

    most = farthest(runs, baseline_runs, margin, alpha)
    if most <= 0:
        return 0.0
    shares = (numpy.arange(500) + 0.5) / 500
    mean = (ndtri(shares) / math.sqrt(baseline_runs))[:, None]
    deviation = numpy.sqrt(chdtri(baseline_runs - 1, shares) / (baseline_runs - 1))[None, :]
    reach, unit = most * deviation, math.sqrt(runs)
    inside = ndtr((mean + reach) * unit) - ndtr((mean - reach) * unit)
    return float((inside**groups).mean())


def _scale(runs: int, baseline_runs: int) -> float:
    """Standard deviation of the difference of the two means, in those of one run."""
    return math.sqrt(1 / runs + 1 / baseline_runs)
