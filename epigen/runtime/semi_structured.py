"""Operands of which two of four values are 0, as `torch.sparse.to_sparse_semi_structured` makes them: the product of such a one by the vendor, and its dense values.

A matrix is compressed along its rows, so that it multiplies from the left: as operand a as it is, and as operand b by its transpose, as a linear layer's weight is
given. One that torch's `prune_dense_static_sort` has made is compressed both ways. The vendor rounds sums of 16 bits to the operands' dtype; those of 8 bits come as
int32 and fp32. Raises CallError.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.sparse import SparseSemiStructuredTensorCUSPARSELT, SparseSemiStructuredTensorCUTLASS

from epigen.codegen import sparse
from epigen.codegen.sparse import DENSE
from epigen.dtypes import BY_TORCH_ON_CPU
from epigen.errors import CallError
from epigen.ir import reference
from epigen.ir.graph import Graph
from epigen.runtime import arguments, overlap, vendor
from epigen.runtime.arguments import ALIGNED_BYTES

TYPES = frozenset((SparseSemiStructuredTensorCUTLASS, SparseSemiStructuredTensorCUSPARSELT))
"""torch's two classes, which parameters of such a tensor have as well. Each is multiplied by the library that it is called after."""

_CALLED = {SparseSemiStructuredTensorCUTLASS: "CUTLASS", SparseSemiStructuredTensorCUSPARSELT: "cuSPARSELt"}


@contextmanager
def unwarned() -> Iterator[None]:
    """torch warns once of each class that it is a prototype, which who made none need not be told."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The PyTorch API of SparseSemiStructuredTensor", UserWarning)
        yield


@dataclass(frozen=True, slots=True)
class Compressed:
    """A matrix [rows, K] of which each four neighbours along K hold two values. kind: one of TYPES. packed: the values, and of cuSPARSELt behind them where they are;
    meta: where they are, of CUTLASS. alg_id: of cuSPARSELt's kernels."""

    kind: Any
    shape: tuple[int, int]
    packed: Tensor
    meta: Tensor | None
    alg_id: int = 0

    @classmethod
    def of(cls, t: Any, transposed: bool) -> Compressed | None:
        """What is compressed of a tensor, or of its transpose; None where that is not."""
        packed, meta = (t.packed_t, t.meta_t) if transposed else (t.packed, t.meta)
        rows, columns = t.shape[::-1] if transposed else t.shape
        return None if packed is None else cls(type(t), (rows, columns), packed, meta, getattr(t, "alg_id_cusparselt", 0))

    @classmethod
    def of_numbers(cls, packed: Tensor, meta: Tensor | None, numbers: Sequence[int]) -> Compressed:
        """numbers: as `numbers` has them."""
        rows, columns, of_cusparselt, alg_id = numbers
        return cls(SparseSemiStructuredTensorCUSPARSELT if of_cusparselt else SparseSemiStructuredTensorCUTLASS, (rows, columns), packed, meta, alg_id)

    @property
    def numbers(self) -> list[int]:
        """All that is no tensor."""
        return [*self.shape, int(self.kind is SparseSemiStructuredTensorCUSPARSELT), self.alg_id]

    @classmethod
    def without_contents(cls, rows: int, columns: int, dtype: torch.dtype) -> Compressed:
        """One of cuSPARSELt's, on the meta device."""
        return cls(SparseSemiStructuredTensorCUSPARSELT, (rows, columns), torch.empty(rows * columns * 9 // 16, dtype=dtype, device="meta"), None)

    def tensor(self, transposed: bool = False) -> Any:
        """torch's own tensor of it, or of its transpose."""
        held, none = (self.packed, self.meta), (None, None)
        ways, shape = ((*none, *held), self.shape[::-1]) if transposed else ((*held, *none), self.shape)
        kind: Any = self.kind
        with unwarned():
            return kind(torch.Size(shape), *ways, None, alg_id_cusparselt=self.alg_id)

    @property
    def stands_for(self) -> Tensor:
        """A tensor of its extents without contents."""
        return torch.empty(self.shape, dtype=self.packed.dtype, device="meta")

    def times(self, other: Tensor, transposed: bool, wanted: torch.dtype) -> Tensor:
        """This [rows, K] @ other [K, N]; transposed: the same as other.T [N, K] @ this.T, for which other.T lies along K. Contiguous, in `wanted`, which for 16 bits is
        the operands' own dtype."""
        extents = (other.shape[1], self.shape[0]) if transposed else (self.shape[0], other.shape[1])
        if 0 in (*extents, other.shape[0]):
            return torch.zeros(extents, dtype=wanted, device=other.device)
        if not other.is_cuda:
            found = vendor.product(dense(self), other, "ieee")
            return (found.t() if transposed else found).to(wanted).contiguous()
        try:
            return self._by_library(other, transposed, wanted)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # torch's own words for a GPU or a build without such a product
            raise CallError(f"{self.called} does not multiply this 2:4 sparse operand ({str(error).splitlines()[0]}): {DENSE}") from error

    def _by_library(self, other: Tensor, transposed: bool, wanted: torch.dtype) -> Tensor:
        padded, columns = self._as_taken(other, transposed), other.shape[1]
        out_dtype = None if wanted == other.dtype else wanted
        if self.kind is SparseSemiStructuredTensorCUSPARSELT:
            # fp8's result is not known to be had transposed
            turned = transposed and other.dtype != torch.float8_e4m3fn
            found = torch._cslt_sparse_mm(self.packed, padded, out_dtype=out_dtype, transpose_result=turned, alg_id=self.alg_id)
            found = found.t() if turned else found
        else:
            assert self.meta is not None
            found = torch._sparse_semi_structured_mm(self.packed, self.meta, padded, out_dtype=out_dtype)
        found = found[: self.shape[0], :columns]
        return (found.t() if transposed else found).contiguous()

    def _as_taken(self, other: Tensor, transposed: bool) -> Tensor:
        """The dense matrix as the libraries take it: without gaps in either order, of which they read nothing else from its strides; 8 bits along K; with as many columns
        as they want a multiple of."""
        kind: Any = self.kind
        least = kind._DTYPE_SHAPE_CONSTRAINTS[other.dtype]
        missing = -other.shape[1] % max(least.dense_min_rows, least.dense_min_cols)
        along_k = transposed or other.element_size() == 1
        held = other.t() if along_k else other
        if missing:
            held = torch.nn.functional.pad(held.view(torch.int8) if held.element_size() == 1 else held, (0, 0, 0, missing) if along_k else (0, missing))
            held = held.view(other.dtype)
        held = held.contiguous()
        held = held.clone() if held.data_ptr() % ALIGNED_BYTES else held
        return held.t() if along_k else held

    @property
    def called(self) -> str:
        """By whom it is multiplied."""
        return _CALLED[self.kind]

    @property
    def dense_bytes(self) -> int:
        """Of the matrix with its zeros."""
        return self.shape[0] * self.shape[1] * self.packed.element_size()

    @property
    def dense_values_are_there(self) -> bool:
        return dense_values().known(self) is not None


def dense(held: Compressed) -> Tensor:
    """The matrix [rows, K] with its zeros, contiguous."""
    from torch.sparse._semi_structured_conversions import sparse_semi_structured_to_dense_cutlass

    if held.kind is SparseSemiStructuredTensorCUTLASS and held.meta is not None and held.meta.dim() == 2:
        whole: Tensor = sparse_semi_structured_to_dense_cutlass(held.packed, held.meta)
        return whole
    if not held.packed.is_cuda:
        raise CallError(f"a 2:4 sparse tensor of {held.called}'s on the CPU cannot be read there: make it of a dense one on the GPU")
    # where cuSPARSELt, and torch's pruning, put what, only their products know
    eye = torch.eye(held.shape[1], device=held.packed.device).to(held.packed.dtype)
    return held.times(eye, False, reference.torch_dtype(sparse.product_of(BY_TORCH_ON_CPU[str(held.packed.dtype)]))).to(held.packed.dtype)


class DenseValues:
    """The dense values of sparse operands, for as long as these are there and are what they were."""

    def __init__(self) -> None:
        from torch.utils.weak import WeakIdKeyDictionary

        self.held: Any = WeakIdKeyDictionary()

    def known(self, held: Compressed) -> Tensor | None:
        before = self.held.get(held.packed)
        return None if before is None or before[0] != _state(held) else before[1]

    def of(self, held: Compressed) -> Tensor:
        """Raises CallError while a CUDA graph is captured and they are not there yet: what is made then has no contents until the graph is run."""
        found = self.known(held)
        if found is None:
            if held.packed.is_cuda and torch.cuda.is_current_stream_capturing():
                raise CallError(
                    "the dense values of a 2:4 sparse operand are made at the first call, and a CUDA graph is being captured: make the call once before"
                )
            with torch.inference_mode(False), torch.no_grad():
                found = dense(held)
            if found.is_cuda:
                torch.cuda.current_stream(found.device).synchronize()  # other streams will find them
            self.held[held.packed] = (_state(held), found)
        return found


def _state(held: Compressed) -> tuple[Any, ...]:
    """What its dense values hang on, beside where the compressed ones lie."""
    return held.shape, *(None if t is None or t.is_inference() else t._version for t in (held.packed, held.meta))


@functools.cache
def dense_values() -> DenseValues:
    """Those of this process."""
    return DenseValues()


@dataclass(frozen=True, slots=True)
class Operands:
    """Those of a call, from `of_call`. side: which of them is sparse, "a" or "b". other: the dense one; as operand a perhaps with leading dimensions, whose rows all meet the one b."""

    side: str
    held: Compressed
    other: Tensor

    @property
    def rows(self) -> Tensor:
        """The dense one as a matrix."""
        return self.other if self.other.dim() == 2 else self.other.reshape(-1, self.other.shape[-1])

    @property
    def key(self) -> tuple[Any, ...]:
        """What calls have to have in common to run alike, and lies nowhere."""
        return self.side, self.held.kind, self.held.shape, arguments.key(self.other)

    @property
    def read(self) -> tuple[Tensor, Tensor]:
        """The tensors that operands a and b are read from."""
        return (self.held.packed, self.other) if self.side == "a" else (self.other, self.held.packed)

    @property
    def standing(self) -> tuple[Tensor, Tensor]:
        """Both, of which the sparse one has no contents."""
        stand_in = self.held.stands_for
        return (stand_in, self.other) if self.side == "a" else (self.rows, stand_in.t())

    @property
    def shape(self) -> tuple[int, int, int]:
        a, b = self.standing
        return a.shape[0], b.shape[1], a.shape[1]

    def product(self, wanted: torch.dtype) -> Tensor:
        """By the vendor: [..., M, N], contiguous."""
        if self.side == "a":
            return self.held.times(self.other, False, wanted)
        found = self.held.times(self.rows.t(), True, wanted)
        return found.view(*self.other.shape[:-1], found.shape[1])

    def dense(self) -> tuple[Tensor, Tensor]:
        """Both with all their values."""
        whole = self.held.stands_for if self.other.is_meta else dense_values().of(self.held)
        return (whole, self.other) if self.side == "a" else (self.other, whole.t())


def of_call(operands: Sequence[Any]) -> Operands:
    """A call's operands, of which one is sparse and can be multiplied from its side. The rest `check` asks."""
    a, b = operands
    side = "a" if type(a) in TYPES else "b"
    t, other = (a, b) if side == "a" else (b, a)
    if type(other) in TYPES:
        raise CallError("operands a and b are both 2:4 sparse, and a product has one such operand: pass the dense values of one, as t.to_dense() has them")
    if not isinstance(other, Tensor):
        raise CallError(f"operand {'b' if side == 'a' else 'a'} is {arguments.kind(other)}, and a tensor was expected")
    if other.dim() != 2 and (side == "a" or other.dim() < 2):
        wanted = "[K, N]" if side == "a" else "[..., M, K]"
        raise CallError(f"operand {side} is 2:4 sparse, and beside it the other one is {wanted}: it has shape {list(other.shape)}")
    held = Compressed.of(t, side == "b")
    if held is None:
        way = "its transpose is multiplied, as a linear layer's weight.t()" if side == "b" else "one is multiplied as it was made, and not transposed"
        raise CallError(
            f"operand {side} is 2:4 sparse along the other index than k: as operand {side} {way}; "
            "what torch.sparse.SparseSemiStructuredTensorCUSPARSELT.prune_dense_static_sort makes is so along both"
        )
    return Operands(side, held, arguments.shown(other))


def check(graph: Graph, given: Operands) -> None:
    """That a call's operands fit together."""
    side, held, other = given.side, given.held, given.other
    if held.packed.device != other.device:
        raise CallError(f"operand {side} is on {held.packed.device} and the other one on {other.device}")
    _, _, k = arguments.check_operands(graph, *(t.to("meta") for t in given.standing))
    if other.dtype != held.packed.dtype:
        raise CallError(f"operand {side} is 2:4 sparse {held.packed.dtype} and the other one {other.dtype}: both need the same dtype")
    sparse.check_operands(side, BY_TORCH_ON_CPU[str(other.dtype)], k)


def compressed(a: Tensor, b: Tensor, side: str) -> tuple[Any, Any]:
    """A call's operands, of which torch compresses one, of dense values with its zeros."""
    with unwarned():
        if side == "a":
            return torch.sparse.to_sparse_semi_structured(a), b
        return a, torch.sparse.to_sparse_semi_structured(b.t()).t()


def as_given(product: Tensor) -> Tensor:
    """As a program takes a product that is given: int32 as fp32, in which a kernel of int8 computes."""
    return product.float() if product.dtype == torch.int32 else product


def written(product: Tensor, of_out: tuple[str, Any]) -> Tensor:
    """A product in the caller's buffer. of_out: that, after its name."""
    name, into = of_out
    if not isinstance(into, Tensor) or (into.shape, into.dtype, into.device) != (product.shape, product.dtype, product.device) or overlap.within(into):
        found = f"{into.dtype} {list(into.shape)} on {into.device}" if isinstance(into, Tensor) else f"a {type(into).__name__}"
        raise CallError(
            f"out for '{name}' is {found}, and {product.dtype} {list(product.shape)} on {product.device} was expected, with a place for each element"
        )
    return into.copy_(product)
