"""When what happened in a step."""
