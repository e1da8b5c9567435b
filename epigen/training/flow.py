"""What follows what in a model: read from each module's own `forward`, traced by torch.fx with all modules inside it left whole.

A forward may branch on whether it trains and on arguments that have defaults, so it is traced in each of these ways. Where a branch hangs on
anything else torch.fx refuses, and nothing is known of the modules inside.
"""

from __future__ import annotations

import inspect
import itertools
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import fx, nn

from epigen.training.modules import Chain

_MOST_DEFAULTS = 4
"""Arguments with defaults of one forward, each of which doubles the traces."""


@dataclass(frozen=True, slots=True)
class Flow:
    """names: of each module, all that it has in the model.

    after: of each module that is called, what takes the results of its calls: a module that takes nothing else, or a text that says why there
    is no such. before: of each, the modules whose results it takes; None for anything else that it is given.
    untraced: of each module inside a forward that could not be traced, why.
    """

    names: dict[nn.Module, list[str]] = field(default_factory=dict)
    after: dict[nn.Module, set[nn.Module | str]] = field(default_factory=dict)
    before: dict[nn.Module, set[nn.Module | None]] = field(default_factory=dict)
    untraced: dict[nn.Module, str] = field(default_factory=dict)


def flow(model: nn.Module) -> Flow:
    """Calls no module: what is traced is run on torch.fx's proxies."""
    found = Flow()
    for name, module in model.named_modules(remove_duplicate=False):
        found.names.setdefault(module, []).append(name)
    for module, (name, *_) in found.names.items():
        if not any(True for _ in module.children()) or isinstance(module, nn.ModuleList | nn.ModuleDict):
            continue
        try:
            graphs = list(_traces(module))
        except Exception as error:  # noqa: BLE001  # whatever a user's forward raises on proxies
            said = str(error).partition("\n")[0]
            why = f"the forward of {name or 'the model'} ({type(module).__name__}) cannot be traced: {said or type(error).__name__}"
            found.untraced.update(dict.fromkeys(module.modules(), why))
            continue
        for graph in graphs:
            for node in graph.nodes:
                if node.op == "call_module":
                    called = module.get_submodule(str(node.target))
                    found.before.setdefault(called, set()).add(_before(module, node))
                    found.after.setdefault(called, set()).add(_after(module, node))
    return found


class _Whole(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:  # noqa: ARG002  # torch.fx's own names
        return True


def _traces(module: nn.Module) -> Iterator[fx.Graph]:
    """Of a module's forward, one for each way that it can be told to go."""
    if isinstance(module, Chain):  # which gives what its modules give in turn
        module = nn.Sequential(OrderedDict(module._modules))
    parameters = inspect.signature(module.forward).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
    if len(defaults) > _MOST_DEFAULTS:
        raise ValueError(f"{len(defaults)} of its arguments have defaults")
    trains = module.training
    try:
        for module.training, *given in itertools.product((True, False), *((True, False) for _ in defaults)):
            concrete = {name: value for (name, value), left in zip(defaults.items(), given, strict=True) if not left}
            yield _Whole().trace(module, concrete or None)
    finally:
        module.training = trains


def _before(root: nn.Module, node: fx.Node) -> nn.Module | None:
    (source, *more) = node.args or (None,)
    alone = isinstance(source, fx.Node) and source.op == "call_module" and not more and not node.kwargs and len(source.users) == 1
    return root.get_submodule(str(source.target)) if alone else None  # type: ignore[union-attr]


def _after(root: nn.Module, node: fx.Node) -> nn.Module | str:
    if len(node.users) != 1:
        return f"its result is used in {len(node.users)} places" if node.users else "its result is not used"
    (user,) = node.users
    if user.op == "output":
        return "its result goes out of its module's forward, and no activation follows there"
    if user.op == "call_module":
        return root.get_submodule(str(user.target)) if _before(root, user) else f"{user.target} takes other arguments beside it"
    name = user.target if isinstance(user.target, str) else getattr(user.target, "__name__", str(user.target))
    return f"{name} follows, a function in a forward: only modules can be replaced"
