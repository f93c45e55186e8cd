"""Where to cut a model for the step that a schedule makes of it, and what each stage then recomputes."""
