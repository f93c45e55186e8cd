"""How to train a model on given machines, and how long a step takes.

    from gpipe_bench.planner import Request, link_named, model_of, plan

    found = plan(model_of("gpt2", 64), Request(accelerators=4, memory_bytes=24 * 2**30, batch_size=64,
                                               link=link_named("pcie", "a10"), device_type="a10"))
    print(found.best.step_s, found.script())

Names are imported when they are first asked for, and torch with the first that needs it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .answer import Plan, plan
    from .candidate import Candidate, Prediction
    from .costs import Costs
    from .model import Model, model_of
    from .request import Request, Space, link_named, link_within

_HOMES = {
    "answer": ("Plan", "plan"),
    "candidate": ("Candidate", "Prediction"),
    "costs": ("Costs",),
    "model": ("Model", "model_of"),
    "request": ("Request", "Space", "link_named", "link_within"),
}
__all__ = [
    "Candidate", "Costs", "Model", "Plan", "Prediction", "Request", "Space", "link_named", "link_within",
    "model_of", "plan",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            found = globals()[name] = getattr(import_module(f"{__name__}.{home}"), name)
            return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
