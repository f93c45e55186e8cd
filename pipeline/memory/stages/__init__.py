"""Layer profiles added up: what a stage and a worker hold, action by action, and at their fullest."""
