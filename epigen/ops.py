"""THE operation table: one row is the whole operation.

A row feeds the parser (name, parameters), the checker (kinds), the code generator (`triton`, `body`), the reference (`torch`),
the error bound (`error`), differentiation (`gradient`) and `epigen ops` (`formula`). Adding an operation is adding a row.

Texts in a row:
- `triton`: an expression, or with `body` the return expression of a small jit function; parameters stand in braces. It names
  `tl`; another dialect renames that module.
- `torch`: the reference, an expression over tensors, independent of the Triton spelling: it is what the spelling is tested against.
- `gradient`: one text in epigen's own language a parameter, the gradient that flows to it; `grad` is the gradient that arrives,
  `out` the result. Linear in `grad`. None where there is none. What it reads is what training has to keep: `out` is often there anyway.
- `error`: the operation's own rounding error in units of 2^-24, in epigen's own language, for exact arguments. The figures are
  upper bounds read from the CUDA programming guide's tables (approximate division, square root, exp2) and confirmed by the
  differential tests on every backend.
- `aten`: the operations of torch that are this row, as `name(params)`: what torch gives in the place of a row's parameter has its name, and a
  keyword is an argument that has to have that value. More of torch's operations are programs of several rows (`training.aten`).
- `rounded`: the row that takes its place where results are rounded to 16 bits, which `ir.passes.rounded` tells: less work, more error.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

NUMBER, BOOLEAN = "number", "boolean"


@dataclass(frozen=True, slots=True)
class Param:
    name: str
    kind: str = NUMBER


@dataclass(frozen=True, slots=True)
class Op:
    """A row for an elementwise operation: broadcasts by index name, fp32 in and out."""

    name: str
    params: tuple[Param, ...]
    formula: str
    triton: str
    torch: str
    gradient: tuple[str | None, ...] = ()
    error: str = "abs(out)"
    result: str = NUMBER
    body: tuple[str, ...] = ()
    symbol: str = ""
    rounded: str = ""
    group: str = ""
    aten: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Reduction:
    """A row for a reduction: an associative `combine` with an identity.

    gradient: what flows to each element `x`. None where one kernel cannot tell: the largest elements share what arrives, and how many
    are equal is known only after all have been seen.

    triton: reduces {x} along {axis}, keeping it with extent 1. combine: joins two partial results, elementwise. Both may be helper functions (`body`,
    `combine_body`). A reduction over tiles is the same reduction over the tiles' results, which every row here satisfies once
    `prepare` has been applied to the elements.
    """

    name: str
    formula: str
    triton: str
    combine: str
    identity: str
    torch: str
    gradient: str | None
    prepare: str = "{x}"
    error: str = "abs(out)"
    body: tuple[str, ...] = ()
    combine_body: tuple[str, ...] = ()


def _numbers(names: str) -> tuple[Param, ...]:
    return tuple(Param(n) for n in names.split())


_NAN = "propagate_nan=tl.PropagateNan.ALL"
_X, _XY, _GZ, _GY = _numbers("x"), _numbers("x y"), _numbers("g z"), _numbers("g y")
_BOOLS = (Param("x", BOOLEAN), Param("y", BOOLEAN))

_ARITHMETIC = (
    Op("add", _XY, "x + y", "{x} + {y}", "{x} + {y}", ("grad", "grad"), symbol="+", aten=("add(x, y, alpha=1)",)),
    Op("sub", _XY, "x - y", "{x} - {y}", "{x} - {y}", ("grad", "-grad"), symbol="-", aten=("sub(x, y, alpha=1)",)),
    Op("mul", _XY, "x * y", "{x} * {y}", "{x} * {y}", ("grad * y", "grad * x"), symbol="*", aten=("mul(x, y)",)),
    Op("div", _XY, "x / y", "{x} / {y}", "{x} / {y}", ("grad / y", "-grad * (out / y)"), "4 * abs(out)", symbol="/", aten=("div(x, y)",)),
    Op("neg", _X, "-x", "-{x}", "-{x}", ("-grad",), "0", symbol="-", aten=("neg(x)",)),
    Op("gt", _XY, "x > y", "{x} > {y}", "{x} > {y}", result=BOOLEAN, symbol=">", aten=("gt(x, y)",)),
    Op("ge", _XY, "x >= y", "{x} >= {y}", "{x} >= {y}", result=BOOLEAN, symbol=">=", aten=("ge(x, y)",)),
    Op("lt", _XY, "x < y", "{x} < {y}", "{x} < {y}", result=BOOLEAN, symbol="<", aten=("lt(x, y)",)),
    Op("le", _XY, "x <= y", "{x} <= {y}", "{x} <= {y}", result=BOOLEAN, symbol="<=", aten=("le(x, y)",)),
    Op("eq", _XY, "x == y", "{x} == {y}", "{x} == {y}", result=BOOLEAN, symbol="==", aten=("eq(x, y)",)),
    Op("ne", _XY, "x != y", "{x} != {y}", "{x} != {y}", result=BOOLEAN, symbol="!=", aten=("ne(x, y)",)),
    Op("and", _BOOLS, "both", "{x} & {y}", "{x} & {y}", result=BOOLEAN, symbol="&", aten=("logical_and(x, y)", "bitwise_and(x, y)")),
    Op("or", _BOOLS, "either", "{x} | {y}", "{x} | {y}", result=BOOLEAN, symbol="|", aten=("logical_or(x, y)", "bitwise_or(x, y)")),
    Op("not", (Param("x", BOOLEAN),), "the opposite", "~{x}", "~{x}", result=BOOLEAN, symbol="~", aten=("logical_not(x)", "bitwise_not(x)")),
    Op("where", (Param("c", BOOLEAN), *_XY), "x where c, else y", "tl.where({c}, {x}, {y})", "torch.where({c}, {x}, {y})",
       (None, "where(c, grad, 0)", "where(c, 0, grad)"), "0", aten=("where(c, x, y)",)),
    Op("minimum", _XY, "the smaller; NaN if either is", f"tl.minimum({{x}}, {{y}}, {_NAN})", "torch.minimum({x}, {y})",
       ("where(x > y, 0, where(x == y, grad / 2, grad))", "where(y > x, 0, where(x == y, grad / 2, grad))"), "0", aten=("minimum(x, y)", "min(x, y)")),
    Op("maximum", _XY, "the larger; NaN if either is", f"tl.maximum({{x}}, {{y}}, {_NAN})", "torch.maximum({x}, {y})",
       ("where(x < y, 0, where(x == y, grad / 2, grad))", "where(y < x, 0, where(x == y, grad / 2, grad))"), "0", aten=("maximum(x, y)", "max(x, y)")),
    Op("clamp", _numbers("x lo hi"), "min(max(x, lo), hi)",
       f"tl.minimum(tl.maximum({{x}}, {{lo}}, {_NAN}), {{hi}}, {_NAN})", "torch.clamp({x}, {lo}, {hi})",
       ("where((x >= lo) & (x <= hi), grad, 0)", "where((x < lo) & (lo < hi), grad, 0)", "where((x > hi) | (lo > hi), grad, 0)"), "0", aten=("clamp(x, lo, hi)",)),
    Op("abs", _X, "|x|", "tl.abs({x})", "torch.abs({x})", ("where(x > 0, grad, where(x < 0, -grad, 0))",), "0", aten=("abs(x)",)),
    Op("exp", _X, "e^x", "tl.exp({x})", "torch.exp({x})", ("grad * out",), "(4 + 2 * abs(x)) * out", aten=("exp(x)",)),
    Op("log", _X, "natural logarithm", "tl.log({x})", "torch.log({x})", ("grad / x",), "4 + 4 * abs(out)", aten=("log(x)",)),
    Op("sqrt", _X, "square root", "tl.sqrt({x})", "torch.sqrt({x})", ("grad / (2 * out)",), "4 * out", aten=("sqrt(x)",)),
    Op("rsqrt", _X, "1 / sqrt(x)", "tl.rsqrt({x})", "torch.rsqrt({x})", ("-0.5 * grad * (out * out * out)",), "6 * out", aten=("rsqrt(x)",)),
    Op("erf", _X, "Gauss error function", "tl.erf({x})", "torch.erf({x})", ("grad * 1.1283791670955126 * exp(-x * x)",), "6 * abs(out)", aten=("erf(x)",)),
    Op("scale", _numbers("x s"), "x * s", "{x} * {s}", "{x} * {s}", ("grad * s", "grad * x")),
)  # fmt: skip


def _cdf(what: str, *tail: str) -> tuple[str, ...]:
    """What gelu multiplies x by, from its value at -|x|: a power of two whose exponent is a polynomial, without a branch or a division, where erf has
    both and takes three times as long.
    """
    return (f"# {what}", "a = tl.abs({x})", *tail, "cdf = tl.where({x} < 0.0, tail, 1.0 - tail)")


# a minimax fit on [0, 6], weighted so that the relative error stays below 2e-4 up to 5: within 1.2e-7 everywhere
_CDF = _cdf(
    "Phi(-a): the normal distribution's tail",
    "p = -8.20433706e-05 + a * (1.79877661e-05 - a * 1.101978e-06)",
    "p = -0.459138751 + a * (-0.0527213626 + a * (0.00739692245 + a * (-0.00039226716 + a * p)))",
    "tail = tl.exp2(-1.0 + a * (-1.1511122 + a * p))",
)


# three multiplications less, each of which is 1.6 % of 8192x8192x1024 in bf16 and 2.8 % at K = 512 (H200, Triton 3.6, 2026-11). The tail's relative
# error is below 6.2e-5, and where x times it is smaller than 2.5e-4, the product's absolute error below 1.6e-8: fp16 rounds by up to 4.9e-4 and 3e-8
_CDF_16BIT = _cdf(
    "Phi(-a) to 6e-5 of it, where results are rounded to 16 bits",
    "p = -0.0490633622 + a * (0.00607852405 - a * 0.00034688256)",
    "tail = tl.exp2(-1.0000881 + a * (-1.14966464 + a * (-0.463032365 + a * p)))",
)
_PDF = "pdf = tl.exp2(-1.3257480647361593 - 0.7213475204444817 * {z} * {z})"
_TAIL_ERROR = "515 * (1 - erf(0.7071067811865476 * abs({x})))"


def _of_z(lines: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(line.replace("{x}", "{z}") for line in lines)


def _logistic(exponent: str) -> tuple[str, ...]:
    """1 / (1 + 2^exponent) is r * r, of which nothing cancels.

    On Hopper a function that the special function unit has, such as exp2 or rsqrt, is nearly free beside the tensor cores' products, while each
    multiplication and addition takes them a cycle: 2.6 us of 380 for 8192x8192x2048 in bf16 (H200, Triton 3.6, 2026-11). A division is six of
    those. tl.exp takes three more than tl.exp2 to keep what is below 2^-126, which 1 + e does not notice.
    """
    return (f"e = tl.exp2({exponent})", "r = tl.rsqrt(1.0 + e)")


_SIGMOID = _logistic("-1.4426950408889634 * {x}")
# (1 + tanh(y)) / 2 is 1 / (1 + e^(-2 y)), and y = sqrt(2 / pi) * (x + 0.044715 x^3)
_TANH_EXPONENT = "{x} * (-2.302208198144325 - 0.1029432395800235 * {s})"

_ACTIVATIONS = (
    Op("relu", _X, "max(x, 0); NaN stays NaN", f"tl.maximum({{x}}, 0.0, {_NAN})", "torch.relu({x})", ("drelu(grad, ~(out <= 0))",), "0", aten=("relu(x)",)),
    Op("leaky_relu", _numbers("x slope"), "x where x > 0, else slope * x", "tl.where({x} > 0.0, {x}, {x} * {slope})",
       "torch.where({x} > 0, {x}, {x} * {slope})", ("where(x > 0, grad, grad * slope)", "where(x > 0, 0, grad * x)"), aten=("leaky_relu(x, slope)",)),
    Op("gelu", _X, "x * (1 + erf(x / sqrt 2)) / 2", "{x} * cdf",
       "{x} * torch.special.ndtr({x})", ("dgelu(grad, x)",), "8 * abs(x)", body=_CDF, rounded="gelu_16bit", aten=("gelu(x, approximate='none')",)),
    Op("gelu_tanh", _X, "x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))) / 2", "{x} * r * r",
       "torch.nn.functional.gelu({x}, approximate='tanh')", ("dgelu_tanh(grad, x)",), "12 * abs(x)", body=_logistic(_TANH_EXPONENT.format(x="{x}", s="({x} * {x})")), aten=("gelu(x, approximate='tanh')",)),
    Op("silu", _X, "x * sigmoid(x)", "{x} * r * r", "torch.nn.functional.silu({x})", ("dsilu(grad, x)",), "(12 + 4 * abs(x)) * abs(out)", body=_SIGMOID, aten=("silu(x)",)),
    Op("sigmoid", _X, "1 / (1 + e^-x)", "r * r", "torch.sigmoid({x})", ("dsigmoid(grad, out)",), "(12 + 4 * abs(x)) * out", body=_SIGMOID, aten=("sigmoid(x)",)),
    Op("tanh", _X, "hyperbolic tangent", "tl.where(a < 0.3, small, tl.where({x} < 0.0, -large, large))", "torch.tanh({x})", ("dtanh(grad, out)",), "14 * abs(out)",
       body=("# a series near 0, where 1 - e would cancel",
             "a = tl.abs({x})",
             "s = {x} * {x}",
             "small = {x} * (1.0 + s * (-0.33333333333333333 + s * (0.13333333333333333 + s * (-0.05396825396825397 + s * 0.021869488536155203))))",
             *_logistic("-2.8853900817779268 * a"),
             "large = (1.0 - e) * r * r"), aten=("tanh(x)",)),
    Op("softplus", _X, "log(1 + e^x)", f"tl.maximum({{x}}, 0.0, {_NAN}) + log1p", "torch.nn.functional.softplus({x}, threshold=50.0)",
       ("grad * sigmoid(x)",), "(12 + 4 * abs(x)) * out",
       body=("# log1p(e) for e in [0, 1]: the factor e / (u - 1) undoes the rounding of u",
             "e = tl.exp(-tl.abs({x}))",
             "u = 1.0 + e",
             "log1p = tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))"), aten=("softplus(x, beta=1, threshold=20)",)),
    Op("hardswish", _X, "x * clamp(x + 3, 0, 6) / 6", "{x} * gate * 0.16666666666666666", "torch.nn.functional.hardswish({x})",
       ("where(x <= -3, 0, where(x < 3, grad * (x / 3 + 0.5), grad))",), "8 * abs(x)",
       body=(f"gate = tl.minimum(tl.maximum({{x}} + 3.0, 0.0, {_NAN}), 6.0, {_NAN})",), aten=("hardswish(x)",)),
)  # fmt: skip

# f'(z) of the activations whose derivative needs z. Second derivatives follow by differentiating these formulas once more.
_DERIVATIVES = (
    Op("drelu", (Param("g"), Param("p", BOOLEAN)), "g where p, else 0", "tl.where({p}, {g}, 0.0)", "torch.where({p}, {g}, 0.0)",
       ("drelu(grad, p)", None), "0"),
    Op("dgelu", _GZ, "g * (Phi(z) + z * phi(z))", "{g} * (cdf + {z} * pdf)",
       "{g} * (0.5 * (1.0 + torch.erf({z} * 0.7071067811865476)) + {z} * torch.exp(-0.5 * {z} * {z}) * 0.3989422804014327)",
       ("dgelu(grad, z)", "grad * g * 0.3989422804014327 * exp(-0.5 * z * z) * (2 - z * z)"), "16 * abs(g)",
       body=(*_of_z(_CDF), _PDF), rounded="dgelu_16bit", aten=("gelu_backward(g, z, approximate='none')",)),
    Op("dgelu_tanh", _GZ, "g * d/dz gelu_tanh(z)", "{g} * (cdf + {z} * (du * (tail * s)))",
       "{g} * torch.ops.aten.gelu_backward(torch.ones_like({z}), {z}, approximate='tanh')",
       ("dgelu_tanh(grad, z)",
        ("grad * g * (1 - tanh(0.7978845608028654 * (z + 0.044715 * z ** 3)) ** 2) * (0.7978845608028654 * (1 + 0.134145 * z * z)"
         " * (1 - z * tanh(0.7978845608028654 * (z + 0.044715 * z ** 3)) * 0.7978845608028654 * (1 + 0.134145 * z * z))"
         " + 0.10703222440890037 * z * z)")), "64 * abs(g)",
       body=("# 1 - cdf from e where it is small, for 1 - s would cancel", *_logistic(_TANH_EXPONENT.format(x="tl.abs({z})", s="({z} * {z})")), "s = r * r",
             "tail = e * s", "cdf = tl.where({z} < 0.0, tail, s)", "du = 1.5957691216057308 + 0.21406444881780072 * ({z} * {z})"), rounded="dgelu_tanh_16bit", aten=("gelu_backward(g, z, approximate='tanh')",)),
    Op("dsilu", _GZ, "g * s * (1 + z * (1 - s)), s = sigmoid(z)", "{g} * s * (1.0 + {z} * (1.0 - s))",
       "{g} * torch.sigmoid({z}) * (1 + {z} * (1 - torch.sigmoid({z})))",
       ("dsilu(grad, z)", "grad * g * dsigmoid(2 + z * (1 - 2 * sigmoid(z)), sigmoid(z))"), "(24 + 4 * minimum(abs(z), 20)) * abs(g)",
       body=(*_of_z(_SIGMOID), "s = r * r"), aten=("silu_backward(g, z)",)),
    Op("dsigmoid", _GY, "g * y * (1 - y)", "{g} * {y} * (1.0 - {y})", "{g} * {y} * (1 - {y})",
       ("grad * y * (1 - y)", "grad * g * (1 - 2 * y)"), "4 * abs(g * y) * (1 + abs(y))", aten=("sigmoid_backward(g, y)",)),
    Op("dtanh", _GY, "g * (1 - y^2)", "{g} * (1.0 - {y} * {y})", "{g} * (1 - {y} * {y})",
       ("grad * (1 - y * y)", "-2 * grad * g * y"), "4 * abs(g) * (1 + y * y)", aten=("tanh_backward(g, y)",)),
)  # fmt: skip

REDUCTIONS: dict[str, Reduction] = {
    r.name: r
    for r in (
        Reduction("sum", "sum of the elements", "tl.sum({x}, {axis}, keep_dims=True)", "{x} + {y}", "0.0", "torch.sum({x}, {dim})", "grad",
                  error="64 * sum(abs(x))"),
        Reduction("max", "largest element; NaN if any is", "tl.reduce({x}, {axis}, maximum, keep_dims=True)", "maximum({x}, {y})", "float('-inf')",
                  "torch.amax({x}, {dim})", None, error="0",
                  combine_body=(f"return tl.maximum(x, y, {_NAN})",)),
        Reduction("amax", "largest magnitude; NaN if any is", "tl.reduce({x}, {axis}, maximum, keep_dims=True)", "maximum({x}, {y})", "0.0",
                  "torch.amax(torch.abs({x}), {dim})", None, prepare="tl.abs({x})", error="0",
                  combine_body=(f"return tl.maximum(x, y, {_NAN})",)),
        Reduction("logsumexp", "log of the sum of e^x", "logsumexp({x}, {axis})", "logaddexp({x}, {y})", "float('-inf')",
                  "torch.logsumexp({x}, {dim})", "grad * exp(x - out)", error="64 + 16 * abs(out)",
                  body=("top = tl.max(x, axis, keep_dims=True)",
                        "top = tl.where(tl.abs(top) == float('inf'), 0.0, top)  # inf - inf would be NaN",
                        "return tl.log(tl.sum(tl.exp(x - top), axis, keep_dims=True)) + top"),
                  combine_body=("top = tl.maximum(x, y)",
                                "top = tl.where(tl.abs(top) == float('inf'), 0.0, top)  # inf - inf would be NaN",
                                "return tl.log(tl.exp(x - top) + tl.exp(y - top)) + top")),
    )
}  # fmt: skip

_EXACT = {op.name: op for op in (*_ACTIVATIONS, *_DERIVATIVES)}


def _to_16_bits(name: str, below: str, error: str, body: tuple[str, ...], triton: str = "") -> Op:
    """What takes the place of a row. below: what its error is below."""
    row = _EXACT[name]
    return replace(
        row, name=row.rounded, formula=f"{name}, with an error below {below}", triton=triton or row.triton, error=error, body=body, rounded="", aten=()
    )


_ROUNDED = (
    _to_16_bits("gelu", "6.2e-5 * Phi(-|x|)", f"abs(x) * ({_TAIL_ERROR.format(x='x')} + 8)", _CDF_16BIT),
    _to_16_bits("dgelu", "6.2e-5 * Phi(-|z|)", f"abs(g) * ({_TAIL_ERROR.format(x='z')} + 16)", (*_of_z(_CDF_16BIT), _PDF)),
    # four instructions less than where 1 - s is taken from e; so it cancels, and what s is rounded by counts up to 35 times, which is what du becomes
    # before e is nothing beside 1
    _to_16_bits("dgelu_tanh", "2.5e-5 * |g|", "(24 + 10 * minimum(abs(z) * (1.6 + 0.22 * z * z), 38)) * abs(g)",
                ("# s * (1 + du * (1 - s)), where results are rounded to 16 bits", *_logistic(_TANH_EXPONENT.format(x="{z}", s="({z} * {z})")), "s = r * r",
                 "du = {z} * (1.5957691216057308 + 0.21406444881780072 * ({z} * {z}))", "w = {g} * s"), "w + w * (du - s * du)"),
)  # fmt: skip

TABLE: dict[str, Op] = {
    op.name: replace(op, group=group)
    for group, rows in (("arithmetic", _ARITHMETIC), ("activation", _ACTIVATIONS), ("derivative", _DERIVATIVES), ("rounded", _ROUNDED))
    for op in rows
}

BINARY = {op.symbol: op.name for op in TABLE.values() if op.symbol and len(op.params) == 2}
UNARY = {op.symbol: op.name for op in TABLE.values() if op.symbol and len(op.params) == 1}

SPECIAL = {
    "cast": "cast(x, dtype): x rounded to dtype; at an output it sets that output's dtype",
    "bitmask": "bitmask(p): packs a boolean tile, one bit an element, as an output",
    "bits": "bits(name): reads the packed mask `name` as a boolean tile",
    "bgrad": "bgrad(x) = sum(x, m), the gradient of a bias",
}
"""Calls that are part of the language's grammar and no elementwise function of numbers."""

FUNCTIONS = frozenset({n for n, op in TABLE.items() if not op.symbol} | REDUCTIONS.keys() | SPECIAL.keys())
"""Every name that can be called."""
