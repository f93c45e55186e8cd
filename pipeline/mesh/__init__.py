"""The grid of a job: pipelines beside each other, and what they do together."""
