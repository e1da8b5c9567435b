"""Program -> typed graph: kinds, indices, labels, names and output dtypes."""

from __future__ import annotations

import ast
import builtins
import keyword

import cases
import pytest
from hypothesis import given
from programs import programs

from epigen import dtypes, ops, settings
from epigen.codegen import schedules
from epigen.codegen.lower import lower, output_dtype
from epigen.codegen.render import Renderer
from epigen.codegen.spec import Signature
from epigen.dtypes import BF16, FP8E4M3, FP8E5M2, FP16, FP32, INT8, INT32, UINT8, DType
from epigen.errors import CheckError
from epigen.ir.check import check
from epigen.ir.graph import Graph, Node
from epigen.ir.passes import normalise
from epigen.lang.parser import parse
from epigen.ops import BOOLEAN, NUMBER


def graph_of(text: str) -> Graph:
    return normalise(check(parse(text)))


def output_node(text: str, position: int = 0) -> Node:
    graph = graph_of(text)
    return graph.nodes[graph.outputs[position].node]


@pytest.mark.parametrize(
    ("text", "indices"),
    [
        ("mm", "mn"), ("mm[m,n]", "mn"), ("mm + 1", "mn"), ("mm + bias", "mn"), ("bias + scale_a[m] + 0 * mm", "mn"), ("residual, mm", "mn"), ("gate[m,n], mm", "mn"), ("sum(a[m,k], k), mm", "m"),
        ("bias + scale_a[m], mm", "mn"), ("sum(mm, m)", "n"), ("sum(mm, n)", "m"), ("sum(mm)", ""), ("bgrad(mm)", "n"), ("sum(a, k), mm", "m"), ("sum(b, k), mm", "n"),
        ("sum(mm, m) + bias", "n"), ("sum(mm, n) * scale_a[m]", "m"), ("sum(mm) * alpha", ""), ("sum(mm, n) * alpha + 1", "m"), ("sum(mm, m) + sum(b, k)", "n"), ("max(bias + scale_a[m]), mm", ""),
    ],
)  # fmt: skip
def test_indices(text: str, indices: str) -> None:
    assert output_node(text).indices == indices


@pytest.mark.parametrize(
    ("text", "reduced"),
    [
        ("mm", False),
        ("sum(mm)", True),
        ("relu(sum(mm, m))", True),
        ("cast(sum(mm), fp16)", True),
        ("sum(mm, m) + bias", True),
        ("where(sum(mm, m) > 0, bias, 0), mm", True),
    ],
)
def test_what_follows_a_reduction_is_marked(text: str, reduced: bool) -> None:
    assert output_node(text).reduced == reduced


@pytest.mark.parametrize("op", ops.TABLE.values(), ids=lambda op: op.name)
def test_each_row_of_the_table_has_its_kinds(op: ops.Op) -> None:
    args = ["mm" if p.kind == NUMBER else "mm > 0" for p in op.params]
    text = f"{op.name}({', '.join(args)})" if not op.symbol else f"({args[0]}) {op.symbol} ({args[1]})" if len(args) == 2 else f"{op.symbol}({args[0]})"
    node = output_node(text if op.result == NUMBER else f"where({text}, 1, 0)")
    assert node.kind == NUMBER
    graph = graph_of(text if op.result == NUMBER else f"bitmask({text})")
    (found,) = [n for n in graph.nodes if n.op == op.name and len(n.args) == len(op.params)][-1:]
    assert found.kind == op.result
    assert [graph.nodes[a].kind for a in found.args] == [p.kind for p in op.params]


@pytest.mark.parametrize("op", ops.TABLE.values(), ids=lambda op: op.name)
def test_each_parameter_refuses_the_other_kind(op: ops.Op) -> None:
    for wrong, param in enumerate(op.params):
        args = ["mm" if (p.kind == NUMBER) != (i == wrong) else "(mm > 0)" for i, p in enumerate(op.params)]
        text = f"{op.name}({', '.join(args)})" if not op.symbol else f"{args[0]} {op.symbol} {args[1]}" if len(args) == 2 else f"{op.symbol}{args[0]}"
        with pytest.raises(CheckError, match=f"be a {param.kind}"):
            check(parse(f"z = {text}; mm, z"))


@pytest.mark.parametrize("op", [op for op in ops.TABLE.values() if not op.symbol], ids=lambda op: op.name)
def test_arguments_by_name_are_the_same_graph(op: ops.Op) -> None:
    args = {p.name: f"mm + {i}" if p.kind == NUMBER else f"mm > {i}" for i, p in enumerate(op.params)}
    placed = f"{op.name}({', '.join(args.values())})"
    named = f"{op.name}({', '.join(f'{n}={v}' for n, v in reversed(args.items()))})"
    assert graph_of(placed) == graph_of(named)


def test_inputs_are_listed_in_order_of_first_use() -> None:
    graph = graph_of("where(bits(keep), mm * scale_a[m], gate[m,n] + bias) * alpha")
    assert [(n.name, n.indices, n.kind) for n in graph.inputs()] == [
        ("keep", "mn", BOOLEAN),
        ("scale_a", "m", NUMBER),
        ("gate", "mn", NUMBER),
        ("bias", "n", NUMBER),
        ("alpha", "", NUMBER),
    ]


def test_predeclared_names() -> None:
    graph = graph_of("where(mask, mm + bias, residual)")
    assert {n.name: (n.op, n.indices) for n in graph.inputs()} == {"mask": ("bits", "mn"), "bias": ("input", "n"), "residual": ("input", "mn")}


def test_a_predeclared_name_may_be_declared_otherwise() -> None:
    assert [n.indices for n in graph_of("mm + bias[m] + bias[m]").inputs()] == ["m"]


@pytest.mark.parametrize("exponent", range(2, 9))
def test_a_power_is_products(exponent: int) -> None:
    graph = graph_of(f"mm ** {exponent}")
    products = [n for n in graph.nodes if n.op == "mul"]
    assert {n.op for n in graph.nodes} == {"operand", "dot", "mul"}
    assert len(products) == exponent.bit_length() - 1 + exponent.bit_count() - 1


def test_bgrad_is_a_sum_over_rows() -> None:
    assert graph_of("bgrad(mm)") == graph_of("sum(mm, m)")


# -- outputs


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("mm", ["out"]),
        ("mm, relu(mm)", ["out0", "out1"]),
        ("z = mm; z", ["z"]),
        ("z = mm + 1; relu(z), z", ["out0", "z"]),
        ("z = mm + 1; cast(z, fp32)", ["out"]),
        ("y = gate[m,n]; mm, y", ["out0", "y"]),
        ("y = relu(mm); z = y; z, y", ["z", "y"]),
        ("out1 = mm + 1; relu(out1), out1", ["out0", "out1"]),
        ("out = mm + 1; relu(out), mm", ["out0", "out1"]),
    ],
)
def test_names_of_outputs(text: str, names: list[str]) -> None:
    assert [o.name for o in graph_of(text).outputs] == names


_OUTPUT_DTYPES = [
    ("mm", {FP32: FP32, FP16: FP16, BF16: BF16, FP8E4M3: BF16, FP8E5M2: BF16, INT8: INT32}),
    ("z = mm; z", {FP16: FP16, INT8: INT32}),
    ("relu(mm)", {FP32: FP32, FP16: FP16, BF16: BF16, FP8E4M3: BF16, FP8E5M2: BF16, INT8: FP32}),
    ("gate[m,n], mm", {FP16: FP16, INT8: FP32}),
    ("sum(mm, m)", {FP32: FP32, FP16: FP32, FP8E4M3: FP32, INT8: FP32}),
    ("relu(sum(mm)) + 1", {BF16: FP32}),
    ("sum(a, k), mm", {FP16: FP32, INT8: FP32}),
    ("cast(sum(mm, n), bf16)", {FP16: BF16, INT8: BF16}),
    ("bitmask(mm > 0)", dict.fromkeys(dtypes.OPERANDS, UINT8)),
    ("cast(cast(mm, fp16), fp32)", {BF16: FP32}),
    ("relu(cast(mm, fp32))", {FP16: FP16}),
    *((f"cast(mm, {t})", dict.fromkeys(dtypes.OPERANDS, t)) for t in dtypes.OPERANDS),
    *((f"z = cast(mm + 1, {t}); z", dict.fromkeys(dtypes.OPERANDS, t)) for t in dtypes.OPERANDS),
]


@pytest.mark.parametrize(("text", "expected"), _OUTPUT_DTYPES, ids=[t for t, _ in _OUTPUT_DTYPES])
def test_dtypes_of_outputs(text: str, expected: dict[DType, DType]) -> None:
    graph = graph_of(text)
    assert {a: output_dtype(graph, graph.outputs[0], a) for a in expected} == expected


@pytest.mark.parametrize(("alias", "dtype"), dtypes.BY_NAME.items(), ids=dtypes.BY_NAME)
def test_dtype_names_and_aliases(alias: str, dtype: DType) -> None:
    assert graph_of(f"cast(mm, {alias})").outputs[0].dtype == dtype
    assert [n.dtype for n in graph_of(f"cast(mm, {alias}) + 1").nodes if n.op == "cast"] == [dtype]


# -- labels: the user's names, which the kernel takes over


@pytest.mark.parametrize(
    "text",
    [
        "y = cast(relu(mm), fp16); y, sum(y), exp(relu(mm))",
        "x = relu(mm); y = relu(mm); x, y, x + y",
        "x = relu(mm); y = cast(x, fp16); y, sum(y)",
        "y = cast(cast(relu(mm), fp16), bf16); y, sum(y, m), cast(relu(mm), fp16) * 2",
        "out1 = mm + 1; relu(out1), out1 * 2, out1 * 3",
        "out = mm + 1; relu(out)",
        "out0 = mm * 2; out1 = mm * 3; out1, out0",
    ],
)
def test_no_two_values_of_a_kernel_have_the_same_name(text: str) -> None:
    # a value that is assigned twice in a kernel would be read with the wrong meaning
    graph = graph_of(text)
    labels = [n.label for n in graph.nodes if n.label]
    assert len(labels) == len(set(labels))
    spec = lower(graph, Signature(FP16, FP16))
    names = [line.name for line in spec.lines]
    assert len(names) == len(set(names))


def test_labels_are_no_part_of_a_values_meaning() -> None:
    assert graph_of("z = relu(mm); z * 2") == graph_of("w = relu(mm); w * 2") == graph_of("relu(mm) * 2")


def test_an_outputs_cast_gives_its_name_to_what_it_rounds() -> None:
    assert [n.label for n in graph_of("y = cast(mm + bias, fp16); y").nodes] == ["", "", "", "", "y"]


# -- names that the generated code needs


_REFUSED = [
    "tl",
    "triton",
    "acc",
    "pid",
    "a_ptr",
    "a_ptrs",
    "stride_am",
    "offs_m",
    "in_tile",
    "BLOCK_M",
    "GROUP_M",
    "M",
    "t0",
    "out0",
    "tiles",
    "to_int8",
    "mask_byte",
    "z_bit",
    "z_in",
    "s_partial",
    "print",
    "min",
    "range",
    "float",
    "gelu",
    "mm",
    "a",
    "m",
    "fp16",
    "half",
]


@pytest.mark.parametrize("name", _REFUSED)
def test_names_of_the_kernels_own_are_refused(name: str) -> None:
    with pytest.raises(CheckError, match=name):
        check(parse(f"mm + {name}[n]"))


@pytest.mark.parametrize("name", [n for n in _REFUSED if n != "out0"])
def test_assignments_to_names_of_the_kernels_own_are_refused(name: str) -> None:
    with pytest.raises(CheckError, match=f"'{name}'"):
        check(parse(f"{name} = relu(mm); {name}"))


def test_every_name_in_a_generated_kernel_is_refused_as_an_input() -> None:
    """The templates may grow; the list of reserved names has to follow."""
    own = {"uu", "vv", "ww", "xx", "yy", "zz", "rr", "cc"}
    text = "cc = where(bits(uu), mm, vv[m,n]) * ww[n] + xx[m] + zz * yy; rr = sum(cc); rr, sum(cc, m) * yy, max(cc, n), logsumexp(cc, n), bitmask(cc > 0), cc, cast(gelu_tanh(cc), int8), sum(a, k), sum(b, k)"
    graph = graph_of(text)
    renderer = Renderer(settings.templates_dir())
    configs = [
        schedules.config("tiled", block_m=64, block_n=64, block_k=32, group_m=8, num_warps=4, num_stages=3),
        schedules.config("library", block_m=8, block_n=128, num_warps=4),
        cases.split_k(),
        cases.persistent(subtiles=2, tma_store=1),
        cases.warp_specialized(subtiles=2),
        cases.warp_specialized(subtiles=2, splits=3),
        cases.warp_specialized(pingpong=1),
    ]
    found: set[str] = set()
    for config in configs:
        for index_bits, factors, bytewise in ((32, (), ()), (64, (("K", 2), ("M", 4), ("N", 8), ("stride_am", 2), ("stride_vv_m", 8)), ("uu", "out4"))):
            inputs = tuple((n.name, None if n.name == "yy" else FP16) for n in graph.inputs())
            signature = Signature(FP16, FP16, inputs, index_bits=index_bits, factors=factors, bytewise=bytewise, tma=("a", "b", "cc"))
            tree = ast.parse(renderer.render(lower(graph, signature), config).text)
            for node in ast.walk(tree):
                if isinstance(node, ast.FunctionDef):
                    if node.name.startswith("epigen"):
                        found |= {n.id for n in ast.walk(node) if isinstance(n, ast.Name)} | {a.arg for a in node.args.args}
                    else:
                        found.add(node.name)
    assert {
        "tl",
        "acc",
        "pid_m",
        "offs_n",
        "to_int8",
        "uu_byte",
        "uu_word",
        "columns_byte",
        "columns_word",
        "stride_vv_m",
        "stride_vv_m_8",
        "N_8",
        "tiles_n",
    } <= found
    free = set()
    for name in found - own:
        try:
            check(parse(f"mm + {name}[n]"))
        except CheckError:
            continue
        free.add(name)
    assert free == set()


@pytest.mark.parametrize("name", [n for n in dir(builtins) if not n.startswith("_") and not keyword.iskeyword(n)])
def test_python_builtins_are_refused(name: str) -> None:
    with pytest.raises(CheckError, match=f"'{name}' is"):
        check(parse(f"mm + {name}[n]"))


# -- properties


@given(programs())
def test_random_programs_keep_the_graphs_invariants(text: str) -> None:
    graph = check(parse(text))
    for number, node in enumerate(graph.nodes):
        assert all(a < number for a in node.args)
        args = [graph.nodes[a] for a in node.args]
        if node.op in ops.TABLE:
            assert node.kind == ops.TABLE[node.op].result
            assert node.indices == "".join(i for i in "mkn" if any(i in a.indices for a in args)) and len(node.indices) < 3
            assert node.reduced == any(a.reduced for a in args)
    assert len(set(graph.nodes)) == len(graph.nodes)
    assert sum(n.op == "dot" for n in graph.nodes) == 1
    for output in graph.outputs:
        node = graph.nodes[output.node]
        assert node.kind != BOOLEAN
        assert node.indices == "mn" or node.reduced
