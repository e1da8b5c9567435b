"""`epigen.fuse`: the forwards in a user's model that call linear layers run these and what follows them in one kernel each.

No module is replaced and no class changed. A module whose own forward calls linear layers gets, as an attribute, a `Forward`: it runs the forward that the
module has, by the plan that a rehearsal has found (`rehearse`, `deferred`); where its code is straight, a function that was written out of both (`straight`, `flat`).
Where anything is not as it was, that forward runs as it is. A linear layer whose weight torchao has rounded gets a `WeightOnly`, which computes it alone, and a
module of experts gets an `Experts`.
"""

from __future__ import annotations

import itertools
import operator
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.nn.modules import module as torchs
from torch.nn.parameter import UninitializedParameter
from torch.overrides import _pop_mode_temporarily

from epigen.checkpoints import of_torchao
from epigen.errors import CallError, EpigenError
from epigen.training import expert_modules, straight, weight_only
from epigen.training.attached import FORWARD, Attached, detach, recorded
from epigen.training.deferred import Plan, Run, watched
from epigen.training.elements import channels_second
from epigen.training.expert_modules import Experts, is_experts
from epigen.training.flat import MISSED, Flat
from epigen.training.guarded_cache import DEVICES, state
from epigen.training.rehearse import Observed, Rehearsed, Unseen, rehearse, tried
from epigen.training.selected import selected
from epigen.training.straight import Bent
from epigen.training.weight_only import WeightOnly

_MOST_FLATS, _MOST_EXTENTS, _MOST_READ = 4, 64, 256
"""What one forward's code is written out to, for other arguments or attributes; for how many extents, if it asks for them; how often it is read at all."""

_WORTH = 32
"""Calls for which nothing is written out, after which code is read once more, if it has been a few times."""

_MOST_PLANS = 8
"""Plans that one forward tries in turn where it never does what it did last."""

_GLANCES = 64
"""Calls of a forward of which nothing is fused, between two that look at all of its modules."""

_LEADS = ((2, 3), (5,))
"""Leading dimensions of the inputs with which a forward is rehearsed before it was ever called."""

_PIXELS = 8
"""Extents of images with which it is."""

_MOST_TRIED = 24
"""Combinations of widths of these inputs."""

_AHEAD = ("cuda",)
"""Devices that a host launches kernels for and does not wait."""

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)

_NOTHING = Rehearsed(Plan(()), [])


class Forward(Attached):
    # A copy of the model makes its own plans.
    def __init__(self, module: nn.Module):
        super().__init__(module)
        self.idle = False
        self.known = Known()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling() or not self.active:
            return type(self.module).forward(self.module, *args, **kwargs)
        known = self.known
        if known.met is not None and known.met.rests(args, kwargs):
            return type(self.module).forward(self.module, *args, **kwargs)
        around = torch._C._len_torch_function_stack()
        if around and isinstance(torch._C._get_function_stack_at(around - 1), Run | Observed):
            with _pop_mode_temporarily():  # of a module around this one, whose plan does not look into it
                return self(*args, **kwargs)
        if not around or not watched():
            for flat in known.flats if known.extents is None else (*known.extents.get(_extents(args, kwargs), ()), *known.flats):
                result = flat.call(args, kwargs)
                if result is not MISSED:
                    return result
            if known.light and self.size(args, kwargs) in known.light:
                return type(self.module).forward(self.module, *args, **kwargs)
        return self.run(args, kwargs)

    def size(self, args: Any, kwargs: Any) -> Any:
        """What it hangs on whether a plan pays."""
        return _extents(args, kwargs), torch.is_grad_enabled(), self.module.training

    def run(self, args: Any, kwargs: Any) -> Any:
        if recorded():
            return self.plain(*args, **kwargs)
        known = self.known
        met = known.met
        if met is None or not met.again(args, kwargs):
            key = self.key(args, kwargs)
            if key is None:
                return self.plain(*args, **kwargs)
            met = known.met = Met(self.module, key, known.plans.get(key) or known.rehearsed(key, self.module, args, kwargs))
        plan = met.rehearsed.plan
        if plan.idle:
            return self.plain(*args, **kwargs)
        run = Run(plan)
        with run:
            result = type(self.module).forward(self.module, *args, **kwargs)
        run.end()
        if run.deviated:
            known.deviated(met.key)
        elif not watched():
            known.flatten(met.key, self.module, run, args, kwargs)
            if met.key in known.bent and met.key[0][1] in _AHEAD and not run.pays and not _in_checkpoint():
                known.light = {**dict(list(known.light.items())[-_MOST_EXTENTS:]), self.size(args, kwargs): None}
        return result

    def key(self, args: Any, kwargs: Any) -> Any:
        """What a plan is made for: what the modules inside are, their modes, and torch's own. None where a plan could not hold."""
        if torchs._global_forward_hooks or torchs._global_forward_pre_hooks or torchs._global_backward_hooks or torchs._global_backward_pre_hooks:
            return None
        first = next((x for x in itertools.chain(args, kwargs.values()) if isinstance(x, Tensor)), None)
        if first is None or (device := first.device.type) not in DEVICES:
            return None
        key: list[Any] = [(first.dtype, device, state(device)[2]), self.module.training]
        pending = list(self.module._modules.values())
        while pending:
            module = pending.pop()
            if module is None:
                continue
            own = module.__dict__
            if own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_backward_hooks"] or own["_backward_pre_hooks"]:
                return None
            forward = own.get("forward")
            if forward is not None and not isinstance(forward, Attached):
                return None
            key += (type(module), own["training"])
            pending += own["_modules"].values()
        return tuple(key)


def _extents(args: Any, kwargs: Any) -> torch.Size | None:
    """Those of the first tensor."""
    if args and isinstance(args[0], Tensor):  # as most often: without a generator
        return args[0].shape
    return next((x.shape for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)


class Met:
    """A call that had a plan, in whose place another is known by looking at the same modules again, and gathering nothing."""

    def __init__(self, module: nn.Module, key: Any, rehearsed: Rehearsed):
        self.module, self.key, self.rehearsed = module, key, rehearsed
        self.first, self.training = key[0], module.training
        self.children = dict(module._modules)
        self.inside = [m for m in module.modules() if m is not module]
        self.kinds = list(map(type, self.inside))
        nothing: Any = OrderedDict()  # none of the modules' own, which would be the same with a hook in it
        self.own = [(vars(m)["training"], nothing, nothing, nothing, nothing, dict(m._modules)) for m in self.inside]
        self.forwards = [vars(m).get("forward") for m in self.inside]
        self.idle, self.glances = rehearsed.plan.idle, 0

    def rests(self, args: Any, kwargs: Any) -> bool:
        """Whether nothing is fused of such a call, as far as a glance tells: the plain forward is right in any case. Now and then it is looked at in full."""
        if not self.idle:
            return False
        self.glances += 1
        return self.glances % _GLANCES != 0 and self.module.training is self.training and self.similar(args, kwargs)

    def similar(self, args: Any, kwargs: Any) -> bool:
        first = args[0] if args else None
        if not isinstance(first, Tensor):
            for first in (*args, *kwargs.values()):
                if isinstance(first, Tensor):
                    break
            else:
                return False
        dtype, device, autocast = self.first
        if first.dtype != dtype or first.device.type != device:
            return False
        return torch.is_autocast_enabled(device) is (autocast is not None) and (autocast is None or torch.get_autocast_dtype(device) == autocast)

    def again(self, args: Any, kwargs: Any) -> bool:
        """Whether `Forward.key` would be the same. In whole comparisons of lists, which take a third of the time of asking one thing after another."""
        if torchs._global_forward_hooks or torchs._global_forward_pre_hooks or torchs._global_backward_hooks or torchs._global_backward_pre_hooks:
            return False
        if not self.similar(args, kwargs):
            return False
        if self.module.training is not self.training or self.module._modules != self.children:
            return False
        owns = list(map(vars, self.inside))
        return list(map(type, self.inside)) == self.kinds and list(map(_read, owns)) == self.own and [own.get("forward") for own in owns] == self.forwards


_read = operator.itemgetter("training", "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_modules")


class Known:
    """What rehearsals have found of one forward. plans: by key. met: the call before. last: what was found last, or why nothing could be. deviations: by key, how
    often another plan was made. flats: what runs in place of the forward's code, the newest first; extents: the same by those of the first tensor, where they
    were asked for; read: how often the code was read; missed: since then, how many calls came for which nothing
    is written out, by extents that are asked for. bent: by key, why it cannot be. light: sizes for which then the forward runs as it is, since a plan takes more time of
    the host than its kernels spare."""

    def __init__(self) -> None:
        self.plans: dict[Any, Rehearsed] = {}
        self.met: Met | None = None
        self.last: Rehearsed | Unseen | None = None
        self.deviations: dict[Any, int] = {}
        self.flats: tuple[Flat, ...] = ()
        self.extents: dict[Any, tuple[Flat, ...]] | None = None
        self.bent: dict[Any, str] = {}
        self.light: dict[Any, None] = {}
        self.read = 0
        self.missed: dict[Any, int] = {}

    def __reduce__(self) -> Any:
        return Known, ()

    def rehearsed(self, key: Any, module: nn.Module, args: Any, kwargs: Any) -> Rehearsed:
        try:
            rehearsed = rehearse(module, args, kwargs)
        except Unseen as unseen:
            self.last = unseen
            rehearsed = _NOTHING
        else:
            self.last = rehearsed
        self.plans[key] = rehearsed
        return rehearsed

    def flatten(self, key: Any, module: nn.Module, run: Run, args: Any, kwargs: Any) -> None:
        """After a call that went by its plan, in which each chain was computed by a function of its own: have those like it need none of the module's code."""
        ways = [(way, plain) for way, plain in run.ways if way is not None]
        if not ways or len(ways) < len(run.ways) or key in self.bent:
            return
        now = state(key[0][1])
        try:
            shape, others = _extents(args, kwargs), self.extents or {}
            known = next((f for f in (*others.get(shape, ()), *self.flats) if f.holds(run.plan, args, kwargs, ways)), None)
            if known is not None:
                known.add(now, args, kwargs, ways)
                return
            if not self.pays(shape):
                return
            self.read += 1
            with tried(module, args, kwargs) as trial, trial.observed:
                read = straight.read(trial.module, trial.args, trial.kwargs, trial.observed, lambda m: type(vars(m).get(FORWARD)) is Forward)
            flat = Flat(module, trial, read, run.plan, args, kwargs)
            flat.add(now, args, kwargs, ways)
        except (Bent, Unseen) as why:
            self.bent[key] = str(why)
            return
        if not read.exact:
            self.flats = (flat, *self.flats)[:_MOST_FLATS]
            return
        self.extents = {**dict(list(others.items())[-_MOST_EXTENTS:]), shape: (flat, *others.get(shape, ()))[:_MOST_FLATS]}

    def pays(self, extents: torch.Size | None) -> bool:
        """Whether to read the code once more, which takes as long as a hundred calls by the plan. What comes ever anew is not worth that: extents that it asks for,
        attributes."""
        if self.read < _MOST_FLATS:
            return True
        of = None if self.extents is None else extents
        count = self.missed.pop(of, 0) + 1
        if count >= _WORTH and self.read < _MOST_READ:
            return True
        self.missed = {**dict(list(self.missed.items())[-_MOST_EXTENTS:]), of: count}
        return False

    def deviated(self, key: Any) -> None:
        """Rehearse it anew at the next call, but within a checkpoint."""
        if not _in_checkpoint():
            self.met = None
            self.deviations[key] = tried = self.deviations.get(key, 0) + 1
            if tried < _MOST_PLANS:
                self.plans.pop(key, None)
            else:
                self.plans[key] = _NOTHING


def _in_checkpoint() -> bool:
    """Whether this may be the first or the second forward of a checkpoint, of which the second has to do what the first did."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None or torch._C._current_graph_task_id() != -1


# -- what a user is told


@dataclass(frozen=True, slots=True)
class Replaced:
    """A linear layer that is computed in one kernel with what follows it. name: in the model. activation: the functions that were joined to it; "" for none, where
    it runs in a chain with the layer before it, or converts a weight of few bits."""

    name: str
    activation: str
    epilogue: str


@dataclass(frozen=True, slots=True)
class Left:
    """A linear layer that runs as it did."""

    name: str
    why: str


@dataclass(frozen=True, slots=True)
class Layer:
    """A linear layer of the model, or a module of experts. forward: of the module whose forward calls it; None where there is none, for the reason `why`. alone: its
    program, where it has a forward of its own."""

    name: str
    module: nn.Module
    owner: str
    forward: Forward | None
    why: str
    alone: str = ""


@dataclass(frozen=True)
class Fused:
    """What `fuse` did. Of a forward that could not be rehearsed beforehand its first call decides, and this tells of it from then on. It prints as a table."""

    layers: tuple[Layer, ...]

    @property
    def replaced(self) -> tuple[Replaced, ...]:
        return tuple(said for said in map(_said, self.layers) if isinstance(said, Replaced))

    @property
    def left(self) -> tuple[Left, ...]:
        return tuple(said for said in map(_said, self.layers) if isinstance(said, Left))

    def __str__(self) -> str:
        said = [_said(layer) for layer in self.layers]
        width = max((len(s.name) for s in said), default=0)
        texts = [(s.epilogue + (f", with {s.activation}" if s.activation else "")) if isinstance(s, Replaced) else f"left: {s.why}" for s in said]
        rows = [f"{s.name or 'the model':{width}}  {text}" for s, text in zip(said, texts, strict=True)]
        convolved = any(isinstance(layer.module, _CONVOLUTIONS) for layer in self.layers)
        stacked = any(is_experts(layer.module) for layer in self.layers)
        flops = [0 if convolved else _flops(layer.module) for layer in self.layers]  # how many rows a convolution has hangs on its images
        done = [f for f, s in zip(flops, said, strict=True) if isinstance(s, Replaced)]
        share = f" ({100 * sum(done) / sum(flops):.0f} % of FLOPs)" if sum(flops) else ""
        kind = "layers" if convolved or stacked else "linear layers"
        return "\n".join([*rows, f"{len(done)} of {len(said)} {kind} fused{share}" if said else "there is no linear layer"])


def _flops(layer: nn.Module) -> int:
    """Multiplications a row. Of a layer whose width its first call tells, none yet."""
    if is_experts(layer):
        return expert_modules.flops(layer)
    return sum(p.numel() for p in layer.parameters() if not isinstance(p, UninitializedParameter) and p.dim() > 1)


def _said(layer: Layer) -> Replaced | Left:
    if layer.alone:
        return Replaced(layer.name, "", layer.alone)
    forward = layer.forward
    if forward is None:
        return Left(layer.name, layer.why)
    known = forward.known.last
    if not isinstance(known, Rehearsed):
        return Left(layer.name, f"the forward of {_shown(layer.owner, forward.module)} cannot be rehearsed: {known}" if known else layer.why)
    own = layer.name.removeprefix(f"{layer.owner}." if layer.owner else "")
    calls = [s for s in known.seen if s.layer is not None and (s.layer == own or s.layer.startswith(f"{own}."))]
    fused = next((s for s in calls if s.fused), None)
    if fused is not None and fused.planned is not None:
        return Replaced(layer.name, ", ".join(fused.taken), fused.planned.text)
    return Left(layer.name, calls[0].why if calls else f"the forward of {_shown(layer.owner, forward.module)} does not call it")


def _shown(name: str, module: nn.Module) -> str:
    return f"{name or 'the model'} ({type(module).__name__})"


# -- what a user calls


def fuse(model: nn.Module, *, only: str | Iterable[str] | Callable[[str, nn.Module], bool] | None = None, dry_run: bool = False) -> Fused:
    """Have the forwards of a model that call linear layers compute each of them and what follows it in one kernel, forward and backward.

    The model is changed in place; its modules, parameters, buffers and hooks stay what and where they are, and so does its state dict. Modules whose own forward
    calls linear layers (`torch.nn.Linear`, a transposed one as in GPT-2, convolutions of one element in channels_last memory) get another `forward`, which runs
    their own code. What follows a layer is told by what is computed, whatever module or function computes it: activations, gates of two layers or of both parts of
    one, residuals, norms over the batch in eval mode, dropout that drops nothing. Linear layers that follow one another so run as a chain. Where a module's code
    does anything else than when it was tried out, that code runs alone: adapters, parametrised layers, hooks, another branch, torch.compile.

    A `torch.nn.Linear` whose weight torchao's `quantize_` has rounded gets a `forward` of its own: one kernel, which converts the weight within the product and adds the
    bias. What follows it is left to torch. The weight stays where it is, and int4 is packed once more beside it. Gradients flow to the input and the bias.

    A weight that torch has made 2:4 sparse is one of these too, by the vendor's sparse product and one kernel for what follows; where nothing does, torch itself runs the layer.

    A module of experts as transformers has them (Mixtral, Qwen-MoE, OLMoE, DeepSeek, gpt-oss) gets one too: grouped kernels, whose first computes the activation and
    multiplies the scores. It waits for nothing that the device computes, and runs under torch.compile.

    only: the modules whose forwards may be changed, such a layer among them: names or patterns ("encoder.*.mlp"), with all that is in them, or a function of name and
    module. dry_run: change nothing, and say what would be.
    Returns what is fused, and what is left and why. Raises CallError for `only` that names no module. `unfuse` undoes it.

    >>> import torch, epigen
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    >>> print(epigen.fuse(model))
    0  relu(mm + bias), with relu
    2  mm + bias
    2 of 2 linear layers fused (100 % of FLOPs)
    """
    _demand_model(model)
    names = {module: name for name, module in model.named_modules()}
    wanted = selected("only", names, only)
    owners: dict[nn.Module, nn.Module] = {}
    forwards: dict[nn.Module, Forward | None] = {}
    reasons: dict[nn.Module, str] = {}
    alone: list[Attached] = []
    layers: list[Layer] = []
    for layer, caller in _owners(model):  # a layer may have several callers, and the report tells of the first
        owners.setdefault(layer, caller)
        if caller not in forwards:
            forwards[caller], reasons[caller] = _made(caller, names[caller], wanted)
    for name, module in model.named_modules():
        rounded = isinstance(module, nn.Linear) and of_torchao(getattr(module, "weight", None))
        if rounded or is_experts(module):
            forward, text, why = _rounded(module, name, wanted) if isinstance(module, nn.Linear) else _experts(module, name, wanted)
            alone += [] if forward is None else [forward]
            layers.append(Layer(name, module, "", None, why, text))
            continue
        if not is_layer(module):
            continue
        owner = owners.get(module)
        if owner is None:
            layers.append(Layer(name, module, "", None, "it is the model itself, and the forward of a module that calls it is what is changed"))
            continue
        layers.append(Layer(name, module, names[owner], forwards[owner], reasons[owner]))
    if not dry_run:
        unfuse(model)
        planned = [forward for forward in forwards.values() if forward is not None and not forward.idle]
        for each in (*planned, *alone):
            each.attach()
    return Fused(tuple(layers))


def unfuse(model: nn.Module) -> None:
    """Undo `fuse`: each module has its own forward again."""
    _demand_model(model)
    for module in model.modules():
        detach(module)


def _demand_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise CallError(f"a model is a torch.nn.Module, and a {type(model).__name__} was given")


def is_layer(module: nn.Module) -> bool:
    """Whether a module is a linear layer: torch's, of whatever subclass, Hugging Face's Conv1D, whose weight lies transposed, or a convolution of one element."""
    weight = getattr(module, "weight", None)
    if isinstance(module, _CONVOLUTIONS):
        return set(module.kernel_size) == {1} and module.groups == 1
    return isinstance(module, nn.Linear) or (hasattr(module, "nf") and isinstance(weight, Tensor) and weight.dim() == 2)


def _owners(model: nn.Module) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Of each linear layer the module whose forward calls it, as far as the tree tells: the next one above it that is no mere list."""
    for module in model.modules():
        if isinstance(module, _CONTAINERS):
            continue
        pending = list(module.children())
        while pending:
            child = pending.pop()
            if isinstance(child, _CONTAINERS):
                pending += child.children()
            elif is_layer(child):
                yield child, module


def _made(owner: nn.Module, name: str, wanted: Callable[[str, nn.Module], bool]) -> tuple[Forward | None, str]:
    """A module's new forward, or None and why there is none. Where it cannot be tried out yet, the reason stands beside it until it is called."""
    shown = _shown(name, owner)
    if not wanted(name, owner):
        return None, f"{shown} is not in only"
    if isinstance(owner, torch.jit.ScriptModule):
        return None, f"{shown} is in TorchScript"
    if type(vars(owner).get("forward", Forward(owner))) is not Forward:
        return None, f"the forward of {shown} was replaced"
    forward = Forward(owner)
    why = _tried(forward)
    return forward, f"the forward of {shown} is rehearsed at its first call{f', since beforehand {why}' if why else ''}"


def _rounded(layer: nn.Linear, name: str, wanted: Callable[[str, nn.Module], bool]) -> tuple[Attached | None, str, str]:
    """The new forward of a layer with a weight of torchao's and its program, or None and why there is none."""
    if not wanted(name, layer):
        return None, "", f"{_shown(name, layer)} is not in only"
    forward = WeightOnly(layer)
    made = forward.current()
    return (None, "", made.why) if made.layer is None else (forward, weight_only.text(made.layer), "")


def _experts(module: nn.Module, name: str, wanted: Callable[[str, nn.Module], bool]) -> tuple[Attached | None, str, str]:
    """The new forward of a module of experts and its program, or None and why there is none."""
    if not wanted(name, module):
        return None, "", f"{_shown(name, module)} is not in only"
    if not isinstance(vars(module).get(FORWARD, None), Attached | None):
        return None, "", f"the forward of {_shown(name, module)} was replaced"
    try:
        forward = Experts(module)
    except EpigenError as error:
        return None, "", str(error).partition("\n")[0]
    return forward, forward.text, ""


def _tried(forward: Forward) -> str:
    """Rehearse a forward on made-up inputs. Returns why it could not be."""
    module = forward.module
    parameters = [p for p in forward.__signature__.parameters.values() if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    held = [p for m in module.modules() for p in m.parameters(recurse=False)]
    if any(isinstance(p, UninitializedParameter) for p in held):
        return "its parameters are not there yet"
    if other := next((p.device.type for p in held if p.device.type not in DEVICES), ""):
        return f"its parameters are on {other}"
    why = "its inputs are not known"
    for place, values in enumerate(itertools.islice(_made_up(module, len(parameters)), _MOST_TRIED)):
        given = {p.name: value for p, value in zip(parameters, values, strict=True)}
        key = forward.key((), given)
        if key is None:
            return "there are hooks or replaced forwards inside"
        try:
            rehearsed = rehearse(module, (), given)
        except Unseen as unseen:
            why = why if place else str(unseen)
            continue
        forward.known.plans[key] = forward.known.last = rehearsed
        if rehearsed.plan.idle:
            try:
                forward.idle = rehearse(module, (), given, not module.training).plan.idle
            except Unseen:
                forward.idle = False
        return ""
    return why


def _made_up(module: nn.Module, count: int) -> Iterator[tuple[Tensor | None, ...]]:
    """Inputs that a forward of so many might take: images for its convolutions, rows for its linear layers."""
    images = [m for m in module.modules() if isinstance(m, _CONVOLUTIONS)]
    for channels, dims in dict.fromkeys((m.in_channels, len(m.kernel_size)) for m in images):
        if count == 1:
            image = torch.empty((2, *[_PIXELS] * dims, channels), dtype=images[0].weight.dtype, device=images[0].weight.device)
            yield (image.permute(channels_second(dims + 2)),)
    weights = [p for m in module.modules() for p in m.parameters(recurse=False) if p.dim() == 2]
    widths = list(dict.fromkeys(extent for p in weights for extent in reversed(p.shape)))
    if not count or not widths:
        return
    later = [widths[0], None, *widths[1:]]  # such as a mask, which may be none
    for lead, extents in itertools.product(_LEADS, itertools.product(widths, *(later for _ in range(count - 1)))):
        yield tuple(None if extent is None else torch.empty((*lead, extent), dtype=weights[0].dtype, device=weights[0].device) for extent in extents)
