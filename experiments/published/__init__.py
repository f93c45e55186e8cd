"""Predictions for accelerators that are not here, at sizes that were published.

The paper's tables were made on TPUs and P100s at sizes that no machine of this project holds. What they
should show is computed: every operation of the full model at the accelerator's published peaks, the step laid
out as the replay does it, over everything that the paper leaves open (results/unknowns.toml). The same code
predicts numbers that others published, so that its error is known where it was not made to fit.
"""
