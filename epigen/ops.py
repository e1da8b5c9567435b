"""THE operation table: one row is the whole operation.

A row feeds the parser (name, parameters), the checker (kinds), the code generator (`triton`, `body`), the reference (`torch`),
the error bound (`error`), differentiation (`gradient`) and `epigen ops` (`formula`). Adding an operation is adding a row.

Texts in a row:
- `triton`: an expression, or with `body` the return expression of a small jit function; parameters stand in braces. It names
  `tl`; another dialect renames that module.
- `torch`: the reference, an expression over tensors, independent of the Triton spelling: it is what the spelling is tested against.
- `gradient`: one text in epigen's own language a parameter, the gradient that flows to it; `grad` is the gradient that arrives,
  `out` the result. Linear in `grad`. None where there is none: of a boolean, and of a number that the result follows in steps alone or that is detached. What it reads is what training has to keep: `out` is often there anyway.
- `error`: the operation's own rounding error in units of 2^-24, in epigen's own language, for exact arguments. The figures are
  upper bounds read from the CUDA programming guide's tables (approximate division, square root, exp2) and confirmed by the
  differential tests on every backend.
- `aten`: the operations of torch that are this row, as `name(params)`: what torch gives in the place of a row's parameter has its name, and a
  keyword is an argument that has to have that value. More of torch's operations are programs of several rows (`training.aten`).
- `grows`: whether the value or the derivative is infinite at numbers that fp32 holds, so that a gradient of 0 would become NaN.
- `rounded`: the row that takes its place where results are rounded to 16 bits, which `ir.passes.rounded` tells: less work, more error.
- `eager`: what torch's own kernel computes, in epigen's language, where that is not the formula here and rounds otherwise.
- `exact`: a Triton expression with the bits of torch's own CUDA kernel, where `triton` has others: by `libdevice`, which Triton ships and its interpreter
  lacks, and by the formulas of ATen's kernels, with the FMAs that nvcc makes of them (tests/runtime/test_rounding.py compares them on a GPU). Of
  `pow` torch has cases of its own: libdevice's is near it in fp32.
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
    eager: str = ""
    exact: str = ""
    group: str = ""
    aten: tuple[str, ...] = ()
    grows: bool = False

    @property
    def jumps(self) -> bool:
        """Whether the result has steps: some number moves it by them alone, and so has no gradient."""
        return self.result == NUMBER and any(text is None and p.kind == NUMBER for p, text in zip(self.params, self.gradient, strict=True))


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


def _expm1(x: str) -> tuple[str, ...]:
    """`grown` is e^x - 1: near 0, where the subtraction would cancel, by its series, whose next term is 2e-9 of x at 0.5."""
    return (
        "# a series near 0, where e^x - 1 would cancel",
        f"p = 0.00138888888888889 + {x} * (0.000198412698412698 + {x} * (2.48015873015873e-05 + {x} * 2.75573192239859e-06))",
        f"small = {x} * (1.0 + {x} * (0.5 + {x} * (0.166666666666667 + {x} * (0.0416666666666667 + {x} * (0.00833333333333333 + {x} * p)))))",
        f"grown = tl.where(tl.abs({x}) < 0.5, small, tl.exp({x}) - 1.0)",
    )


_ARITHMETIC = (
    Op("add", _XY, "x + y", "{x} + {y}", "{x} + {y}", ("grad", "grad"), symbol="+", aten=("add(x, y, alpha=1)",)),
    Op("sub", _XY, "x - y", "{x} - {y}", "{x} - {y}", ("grad", "-grad"), symbol="-", aten=("sub(x, y, alpha=1)",)),
    Op("mul", _XY, "x * y", "{x} * {y}", "{x} * {y}", ("grad * y", "grad * x"), symbol="*", aten=("mul(x, y)",)),
    Op("div", _XY, "x / y", "{x} / {y}", "{x} / {y}", ("grad / y", "-grad * (out / y)"), "4 * abs(out)", symbol="/", exact="tl.div_rn({x}, {y})", aten=("div(x, y)",), grows=True),
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
       ("where(x > y, 0, where(x == y, grad / 2, grad))", "where(y > x, 0, where(x == y, grad / 2, grad))"), "0", aten=("minimum(x, y)", "min(x, other=y)")),
    Op("maximum", _XY, "the larger; NaN if either is", f"tl.maximum({{x}}, {{y}}, {_NAN})", "torch.maximum({x}, {y})",
       ("where(x < y, 0, where(x == y, grad / 2, grad))", "where(y < x, 0, where(x == y, grad / 2, grad))"), "0", aten=("maximum(x, y)", "max(x, other=y)")),
    Op("clamp", _numbers("x lo hi"), "min(max(x, lo), hi)",
       f"tl.minimum(tl.maximum({{x}}, {{lo}}, {_NAN}), {{hi}}, {_NAN})", "torch.clamp({x}, {lo}, {hi})",
       ("where((x >= lo) & (x <= hi), grad, 0)", "where((x < lo) & (lo < hi), grad, 0)", "where((x > hi) | (lo > hi), grad, 0)"), "0", aten=("clamp(x, lo, hi)",)),
    Op("abs", _X, "|x|", "tl.abs({x})", "torch.abs({x})", ("where(x > 0, grad, where(x < 0, -grad, 0))",), "0", aten=("abs(x)",)),
    Op("exp", _X, "e^x", "tl.exp({x})", "torch.exp({x})", ("grad * out",), "(4 + 2 * abs(x)) * out", exact="libdevice.exp({x})", aten=("exp(x)",), grows=True),
    Op("log", _X, "natural logarithm", "tl.log({x})", "torch.log({x})", ("grad / x",), "4 + 4 * abs(out)", aten=("log(x)",), grows=True),
    Op("sqrt", _X, "square root", "tl.sqrt({x})", "torch.sqrt({x})", ("grad / (2 * out)",), "4 * out", exact="tl.sqrt_rn({x})", aten=("sqrt(x)",), grows=True),
    Op("rsqrt", _X, "1 / sqrt(x)", "tl.rsqrt({x})", "torch.rsqrt({x})", ("-0.5 * grad * (out * out * out)",), "6 * out", aten=("rsqrt(x)",), grows=True),
    Op("erf", _X, "Gauss error function", "tl.erf({x})", "torch.erf({x})", ("grad * 1.1283791670955126 * exp(-x * x)",), "6 * abs(out)", aten=("erf(x)",)),
    Op("scale", _numbers("x s"), "x * s", "{x} * {s}", "{x} * {s}", ("grad * s", "grad * x")),
    Op("square", _X, "x * x", "{x} * {x}", "torch.square({x})", ("grad * (2 * x)",), aten=("square(x)",)),
    Op("reciprocal", _X, "1 / x", "1.0 / {x}", "torch.reciprocal({x})", ("-grad * (out * out)",), "4 * abs(out)", exact="tl.div_rn(1.0, {x})", aten=("reciprocal(x)",), grows=True),
    Op("exp2", _X, "2^x", "tl.exp2({x})", "torch.exp2({x})", ("grad * out * 0.6931471805599453",), "4 * out", aten=("exp2(x)",), grows=True),
    Op("expm1", _X, "e^x - 1", "grown", "torch.expm1({x})", ("grad * (out + 1)",), "(18 + 8 * abs(x)) * abs(out)", body=_expm1("{x}"), exact="libdevice.expm1({x})", aten=("expm1(x)",), grows=True),
    Op("log1p", _X, "natural logarithm of 1 + x", "tl.where(tl.abs({x}) < 0.3, small, tl.log(1.0 + {x}))", "torch.log1p({x})", ("grad / (x + 1)",), "28 * abs(out)",
       body=("# a series near 0, where 1 + x would lose x",
             "s = {x} / (2.0 + {x})",
             "q = s * s",
             "small = s * (2.0 + q * (0.66666666666666667 + q * (0.4 + q * (0.28571428571428571 + q * 0.22222222222222222))))"), exact="libdevice.log1p({x})", aten=("log1p(x)",), grows=True),
    Op("pow", _XY, "x to the power of y", "tl.where({x} < 0.0, mirrored, size)", "torch.pow({x}, {y})",
       ("where(y == 0, 0, grad * (y * pow(x, y - 1)))", "where((x == 0) & (y >= 0), 0, grad * out * log(x))"),
       "(8 + 4 * abs(y) * (1 + abs(log(maximum(abs(x), 1e-37))))) * abs(out)",
       body=("a = tl.abs({x})",
             "p = tl.where(a < 0.0, a, {y})  # of the shape of both",
             "size = tl.where(p == 0.0, 1.0, tl.where(a == 1.0, 1.0, tl.exp2(p * tl.log2(a))))",
             "# of a negative number only whole powers are real",
             "whole = tl.where(2.0 * tl.floor(0.5 * p) == p, size, -size)",
             "mirrored = tl.where(tl.floor(p) == p, whole, tl.where(a < float('inf'), float('nan'), size))"), exact="libdevice.pow({x}, {y})", aten=("pow(x, y)",), grows=True),
    Op("sin", _X, "sine", "tl.sin({x})", "torch.sin({x})", ("grad * cos(x)",), "4 * abs(out)", aten=("sin(x)",)),
    Op("cos", _X, "cosine", "tl.cos({x})", "torch.cos({x})", ("-grad * sin(x)",), "4 * abs(out)", aten=("cos(x)",)),
    Op("sign", _X, "1, 0 or -1; 0 of NaN", "tl.where({x} > 0.0, 1.0, tl.where({x} < 0.0, -1.0, 0.0))", "torch.sign({x})", (None,), "0", aten=("sign(x)", "sgn(x)")),
    Op("floor", _X, "the largest integer up to x", "tl.floor({x})", "torch.floor({x})", (None,), "0", aten=("floor(x)",)),
    Op("ceil", _X, "the smallest integer from x on", "tl.ceil({x})", "torch.ceil({x})", (None,), "0", aten=("ceil(x)",)),
    Op("detach", _X, "x, through which no gradient flows", "{x}", "{x}.detach()", (None,), "0"),
    Op("round", _X, "the nearest integer; of two the even one", "tl.where(tl.abs({x}) < 4194304.0, nearest, {x})", "torch.round({x})", (None,), "0",
       body=("# adding 1.5 * 2^23 leaves no fraction bits, so the addition rounds to nearest even",
             "nearest = ({x} + 12582912.0) - 12582912.0"), aten=("round(x)",)),
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

# A logarithm and a division take some thirty instructions, which a compiler spreads over all elements of a tile at once: logsigmoid of whole tiles of 128x128
# spilled 2,184 bytes a thread so, and softplus 1,784 (Triton 3.6.0, sm_90, 2026-11). The polynomial is off by 2e-7 at most, of the result and in fp32.
_SOFTPLUS = (
    "# log1p(e) / e for e in [0, 1]",
    "e = tl.exp(-tl.abs({x}))",
    "high = 0.191060081 + e * (-0.136632472 + e * (0.0782259628 + e * (-0.0295052435 + e * 0.00523269456)))",
    "log1p = e * (0.99999994 + e * (-0.499994934 + e * (0.333190978 + e * (-0.24842982 + e * high))))",
)


def _clamp(x: str, lo: str, hi: str) -> str:
    return f"tl.minimum(tl.maximum({x}, {lo}, {_NAN}), {hi}, {_NAN})"


def _below_zero(over: str = "") -> tuple[str, ...]:
    """`grown` is e^x - 1 where x is negative, of x divided as `over` says; elsewhere it is 0, so that nothing overflows."""
    return (f"below = tl.minimum({{x}}, 0.0, {_NAN}){over}", *_expm1("below"))


def _mish(x: str) -> tuple[str, ...]:
    """tanh(softplus(x)) is n / (n + rest), from e^-|x|: nothing cancels, and nothing overflows."""
    return (
        f"e = tl.exp(-tl.abs({x}))",
        f"n = tl.where({x} >= 0.0, 1.0 + 2.0 * e, e * (e + 2.0))",
        f"rest = tl.where({x} >= 0.0, 2.0 * e * e, 2.0)",
    )


_ACTIVATIONS = (
    Op("relu", _X, "max(x, 0); NaN stays NaN", f"tl.maximum({{x}}, 0.0, {_NAN})", "torch.relu({x})", ("drelu(grad, ~(out <= 0))",), "0", aten=("relu(x)",)),
    Op("leaky_relu", _numbers("x slope"), "x where x > 0, else slope * x", "tl.where({x} > 0.0, {x}, {x} * {slope})",
       "torch.where({x} > 0, {x}, {x} * {slope})", ("where(x > 0, grad, grad * slope)", "where(x > 0, 0, grad * x)"), aten=("leaky_relu(x, slope)",)),
    Op("gelu", _X, "x * (1 + erf(x / sqrt 2)) / 2", "{x} * cdf",
       "{x} * torch.special.ndtr({x})", ("dgelu(grad, x)",), "8 * abs(x)", body=_CDF, rounded="gelu_16bit", eager="x * 0.5 * (1 + erf(x * 0.7071067811865476))", aten=("gelu(x, approximate='none')",)),
    Op("gelu_tanh", _X, "x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))) / 2", "{x} * r * r",
       "torch.nn.functional.gelu({x}, approximate='tanh')", ("dgelu_tanh(grad, x)",), "12 * abs(x)", body=_logistic(_TANH_EXPONENT.format(x="{x}", s="({x} * {x})")),
       exact="0.5 * {x} * (1.0 + libdevice.tanh(0.7978845608028654 * tl.fma(0.044715, {x} * {x} * {x}, {x})))", aten=("gelu(x, approximate='tanh')",)),
    Op("silu", _X, "x * sigmoid(x)", "{x} * r * r", "torch.nn.functional.silu({x})", ("dsilu(grad, x)",), "(12 + 4 * abs(x)) * abs(out)", body=_SIGMOID, exact="tl.div_rn({x}, 1.0 + libdevice.exp(-{x}))", aten=("silu(x)",)),
    Op("sigmoid", _X, "1 / (1 + e^-x)", "r * r", "torch.sigmoid({x})", ("dsigmoid(grad, out)",), "(12 + 4 * abs(x)) * out", body=_SIGMOID, exact="tl.div_rn(1.0, 1.0 + libdevice.exp(-{x}))", aten=("sigmoid(x)",)),
    Op("tanh", _X, "hyperbolic tangent", "tl.where(a < 0.3, small, tl.where({x} < 0.0, -large, large))", "torch.tanh({x})", ("dtanh(grad, out)",), "14 * abs(out)",
       body=("# a series near 0, where 1 - e would cancel",
             "a = tl.abs({x})",
             "s = {x} * {x}",
             "small = {x} * (1.0 + s * (-0.33333333333333333 + s * (0.13333333333333333 + s * (-0.05396825396825397 + s * 0.021869488536155203))))",
             *_logistic("-2.8853900817779268 * a"),
             "large = (1.0 - e) * r * r"), exact="libdevice.tanh({x})", aten=("tanh(x)",)),
    Op("softplus", _X, "log(1 + e^x)", f"tl.maximum({{x}}, 0.0, {_NAN}) + log1p", "torch.nn.functional.softplus({x}, threshold=50.0)",
       ("grad * sigmoid(x)",), "(12 + 4 * abs(x)) * out",
       body=_SOFTPLUS, exact="tl.where({x} > 20.0, {x}, libdevice.log1p(libdevice.exp({x})))", aten=("softplus(x, beta=1, threshold=20)",)),
    Op("hardswish", _X, "x * clamp(x + 3, 0, 6) / 6", "{x} * gate * 0.16666666666666666", "torch.nn.functional.hardswish({x})",
       ("where(x <= -3, 0, where(x < 3, grad * (x / 3 + 0.5), grad))",), "8 * abs(x)",
       body=(f"gate = tl.minimum(tl.maximum({{x}} + 3.0, 0.0, {_NAN}), 6.0, {_NAN})",), aten=("hardswish(x)",)),
    Op("relu6", _X, "min(max(x, 0), 6)", _clamp("{x}", "0.0", "6.0"), "torch.nn.functional.relu6({x})", ("where((x > 0) & (x < 6), grad, 0)",), "0", aten=("relu6(x)", "hardtanh(x, 0, 6)")),
    Op("hardtanh", _numbers("x lo hi"), "min(max(x, lo), hi); no gradient at lo and hi", _clamp("{x}", "{lo}", "{hi}"), "torch.clamp({x}, {lo}, {hi})",
       ("where((x > lo) & (x < hi), grad, 0)", "where((x <= lo) & (lo < hi), grad, 0)", "where((x >= hi) | (lo > hi), grad, 0)"), "0", aten=("hardtanh(x, lo, hi)",)),
    Op("hardsigmoid", _X, "clamp(x + 3, 0, 6) / 6", f"{_clamp('{x} + 3.0', '0.0', '6.0')} * 0.16666666666666666", "torch.clamp({x} + 3.0, 0.0, 6.0) / 6.0",
       ("where((x > -3) & (x < 3), grad / 6, 0)",), "2 + 2 * abs(out)", aten=("hardsigmoid(x)",)),
    Op("elu", _numbers("x alpha"), "x where x > 0, else alpha * (e^x - 1)", "tl.where({x} > 0.0, {x}, {alpha} * grown)",
       "torch.where({x} > 0, {x}, {alpha} * torch.expm1(torch.clamp({x}, max=0.0)))",
       ("where(x > 0, grad, grad * alpha * exp(minimum(x, 0)))", "where(x > 0, 0, grad * expm1(minimum(x, 0)))"), "(20 + 8 * abs(x)) * abs(out)", body=_below_zero(), aten=("elu(x, alpha, scale=1, input_scale=1)",)),
    Op("selu", _X, "1.0507 * x where x > 0, else 1.7581 * (e^x - 1)", "tl.where({x} > 0.0, 1.0507009873554805 * {x}, 1.7580993408473766 * grown)", "torch.selu({x})",
       ("where(x > 0, 1.0507009873554805 * grad, 1.7580993408473766 * grad * exp(minimum(x, 0)))",), "(20 + 8 * abs(x)) * abs(out)", body=_below_zero(), aten=("selu(x)", "elu(x, 1.6732632423543772, 1.0507009873554805, 1)")),
    Op("celu", _numbers("x alpha"), "x where x > 0, else alpha * (e^(x / alpha) - 1)", "tl.where({x} > 0.0, {x}, {alpha} * grown)",
       "torch.where({x} > 0, {x}, {alpha} * torch.expm1(torch.clamp({x}, max=0.0) / {alpha}))",
       ("where(x > 0, grad, grad * exp(minimum(x, 0) / alpha))",
        "where(x > 0, 0, grad * (expm1(minimum(x, 0) / alpha) - minimum(x, 0) / alpha * exp(minimum(x, 0) / alpha)))"),
       "(24 + 16 * abs(x / alpha)) * abs(out)", body=_below_zero(" / {alpha}"), aten=("celu(x, alpha)",)),
    Op("mish", _X, "x * tanh(softplus(x))", "{x} * (n / (n + rest))", "torch.nn.functional.mish({x})", ("dmish(grad, x)",), "(16 + 4 * abs(x)) * abs(out)", body=_mish("{x}"),
       exact="{x} * libdevice.tanh(libdevice.log1p(libdevice.exp({x})))", aten=("mish(x)",)),
    Op("softsign", _X, "x / (1 + |x|)", "{x} / (1.0 + tl.abs({x}))", "torch.nn.functional.softsign({x})", ("grad / ((1 + abs(x)) * (1 + abs(x)))",), "6 * abs(out)"),
    Op("logsigmoid", _X, "-log(1 + e^-x)", f"tl.minimum({{x}}, 0.0, {_NAN}) - log1p", "torch.nn.functional.logsigmoid({x})", ("grad * sigmoid(-x)",),
       "(12 + 4 * abs(x)) * abs(out)", body=_SOFTPLUS, exact=f"tl.minimum({{x}}, 0.0, {_NAN}) - libdevice.log1p(libdevice.exp(-tl.abs({{x}})))", aten=("log_sigmoid(x)", "log_sigmoid_forward(x)")),
    Op("quick_gelu", _X, "x * sigmoid(1.702 * x)", "{x} * r * r", "{x} * torch.sigmoid(1.702 * {x})", ("grad * (sigmoid(1.702 * x) + x * dsigmoid(1.702, sigmoid(1.702 * x)))",), "(12 + 8 * abs(x)) * abs(out)",
       body=_logistic("-2.4554669595930157 * {x}")),
    Op("threshold", _numbers("x least value"), "x where x > least, else value", "tl.where({x} <= {least}, {value}, {x})", "torch.where({x} <= {least}, {value}, {x})",
       ("where(x <= least, 0, grad)", None, "where(x <= least, grad, 0)"), "0", aten=("threshold(x, least, value)",)),
    # no difference with what x is clamped to, which a compiler contracts with the product that x may be: then it is not 0 up to there
    Op("softshrink", _numbers("x width"), "x, nearer to 0 by width, and 0 up to there", "tl.where({x} > {width}, {x} - {width}, tl.where({x} < -{width}, {x} + {width}, {x} * 0.0))",
       "torch.where({x} > {width}, {x} - {width}, torch.where({x} < -{width}, {x} + {width}, {x} * 0.0))",
       ("where((x > width) | (x < -width), grad, 0)", "where(x > width, -grad, where(x < -width, grad, 0))"), aten=("softshrink(x, width)",)),
    Op("hardshrink", _numbers("x width"), "x, and 0 where |x| <= width", "tl.where(tl.abs({x}) <= {width}, 0.0, {x})", "torch.where({x}.abs() <= {width}, 0.0, {x})",
       ("where((x > width) | (x < -width), grad, 0)", None), "0", aten=("hardshrink(x, width)",)),
    Op("tanhshrink", _X, "x - tanh(x)", "tl.where(a < 0.3, small, {x} - tl.where({x} < 0.0, -large, large))", "torch.nn.functional.tanhshrink({x})",
       ("grad * (tanh(x) * tanh(x))",), "16 * abs(x)",
       body=("# a series near 0, where the difference would cancel",
             "a = tl.abs({x})",
             "s = {x} * {x}",
             "small = {x} * s * (0.33333333333333333 - s * (0.13333333333333333 - s * (0.05396825396825397 - s * 0.021869488536155203)))",
             *_logistic("-2.8853900817779268 * a"),
             "large = (1.0 - e) * r * r")),
    Op("prelu", _numbers("x slope"), "x where x > 0, else slope * x", "tl.where({x} > 0.0, {x}, {slope} * {x})", "torch.where({x} > 0, {x}, {slope} * {x})",
       ("where(x > 0, grad, grad * slope)", "where(x > 0, 0, grad * x)"), aten=("prelu(x, slope)", "_prelu_kernel(x, slope)")),
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
    Op("dmish", _GZ, "g * (t + z * s * (1 - t^2)), t = tanh(softplus(z)), s = sigmoid(z)", "{g} * (t + {z} * (s * (1.0 + t) * (rest / (n + rest))))",
       ("{g} * (torch.tanh(torch.nn.functional.softplus({z}, threshold=50.0))"
        " + {z} * torch.sigmoid({z}) * (1 - torch.tanh(torch.nn.functional.softplus({z}, threshold=50.0)) ** 2))"),
       ("dmish(grad, z)",
        "grad * g * (1 - tanh(softplus(z)) ** 2) * sigmoid(z) * (2 + z * (1 - sigmoid(z) - 2 * tanh(softplus(z)) * sigmoid(z)))"), "(32 + 8 * minimum(abs(z), 20)) * abs(g)",
       body=(*_mish("{z}"), "t = n / (n + rest)", "s = tl.where({z} >= 0.0, 1.0, e) / (1.0 + e)"), aten=("mish_backward(g, z)",)),
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
    "dot": "dot(a, b): the product, of a[m,k] and b[k,n] or of what is computed of each, rounded to its dtype; dot(a, b) is mm",
    "int4": "int4(b): an operand b of uint8 as what it holds two of in a byte along k, integers from -8 to 7, the first in the low bits; int4(b, n): along n",
    "uint4": "uint4(b), uint4(b, n): the same of integers from 0 to 15",
    "halves": "halves(mm): both halves of what is computed of a product by a stacked b [K, 2 N], as in x, y = halves(mm); halves(x, y): two tiles beside one another, as an output",
    "pairs": "pairs(mm): the same of columns that lie in turn, x y x y; pairs(x, y): two tiles joined so, as an output",
    "cast": "cast(x, dtype): x rounded to dtype; at an output it sets that output's dtype",
    "quantize": "quantize(x, dtype, n/128): values and scales, as in q, s = quantize(x, fp8e4m3, n/128); s[m, n/128] is the largest magnitude of a block divided by dtype's own, and q is x / s in dtype",
    "bitmask": "bitmask(p): packs a boolean tile, one bit an element, as an output",
    "bits": "bits(name): reads the packed mask `name` as a boolean tile",
    "bgrad": "bgrad(x) = sum(x, m), the gradient of a bias",
    "mean": "mean(x, m | n | k), mean(x) = sum(x, m | n | k) / extent(m | n | k), sum(x) / (extent(m) * extent(n))",
    "extent": "extent(m | n | k): how many rows or columns the result has, or what it is summed over, as a number",
    "uniform": "uniform(seed): a random number in [0, 1) for each element of the result, always the same of one seed, an integer of 64 bits",
    "dropout": "dropout(x, p, seed) = where(uniform(seed) >= p, x * (1 / (1 - p)), 0); no gradient flows to p",
}
"""Calls that are part of the language's grammar and no elementwise function of numbers."""

FUNCTIONS = frozenset({n for n, op in TABLE.items() if not op.symbol} | REDUCTIONS.keys() | SPECIAL.keys())
"""Every name that can be called."""
