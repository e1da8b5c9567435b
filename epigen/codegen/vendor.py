"""Which programs the vendor's library computes whole, by a kernel of its own: what the `library` schedule then calls, and generates nothing.

Only calls that keep the numerics contract: fp32 sums, rounded once at the end. Of those with an epilogue more than a bias, none is known to.
torch runs `_addmm_activation` in two steps where cuBLASLt does not take the problem, and so takes gelu of a rounded value; whether cuBLASLt's
own relu hands NaN on is a question for a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping

from epigen.codegen.spec import ACC, Arg, KernelSpec
from epigen.dtypes import BF16, FP16, FP32

CALLS: Mapping[tuple[str, ...], str] = {
    (): "torch.mm(a, b, out={out})",
    ("add",): "torch.addmm({bias}, a, b, out={out})",
}
"""By the operations that follow the product, each upon the last, and of which an addition adds a bias [n]."""

_DTYPES = (FP16, BF16, FP32)


def whole(spec: KernelSpec) -> str:
    """The row of CALLS that computes a program, in the dtype of its operands; "" if there is none."""
    operands = spec.signature.a
    if spec.pointwise or spec.finishes or len(spec.stores) != 1 or operands not in _DTYPES:
        return ""
    (store,) = spec.stores
    value, operations, beside = ACC, list[str](), list[Arg]()
    for line in spec.lines:
        if line.args.count(value) != 1:
            return ""
        beside += [a for a in line.args if a != value]
        operations.append(line.op)
        value = line.name
    biases = [i.name for i in spec.inputs if i.indices == "n" and i.dtype == operands]
    fits = store.value == value and store.dtype == operands and not store.packed and beside == biases == [i.name for i in spec.inputs]
    return CALLS.get(tuple(operations), "") if fits else ""
