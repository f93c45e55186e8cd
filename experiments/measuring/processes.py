"""Starts the processes of a case and says in one line what went wrong in them.

torch's launcher reports a failed process as a page of text; what a reader of a record needs is which process
failed with which error. The whole traceback stays with the record, as the cause.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def run_processes(
    function: Callable[..., Any], num_processes: int, *arguments: Any, device: str = "cpu"
) -> list[Any]:
    """`gpipe_bench.pipeline.ranks.launch.launch`; RuntimeError with the first failure's own message.

    A machine with fewer GPUs than processes runs them on its CPU unless `device` asks for GPUs.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from gpipe_bench.pipeline.ranks.launch import launch

    try:
        return launch(function, num_processes, *arguments, device=device)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        raise RuntimeError(f"process {rank}: {_message(failure.message)}") from error


def _message(message: Any) -> str:
    """The last line of a failure: "ZeroDivisionError: division by zero"."""
    if isinstance(message, dict):
        message = message.get("message", message)
        if isinstance(message, dict):
            message = message.get("message", message)
    return next((line for line in reversed(str(message).splitlines()) if line.strip()), "no message")
