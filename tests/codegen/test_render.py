"""Spec and config -> source text: golden kernels, equal bytes for equal inputs, and text that a reader has no complaint about."""

from __future__ import annotations

import ast
import builtins
import itertools
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import checkout
import jinja2
import pytest
from cases import persistent, split_k, tiled, warp_specialized
from counting import calls
from hypothesis import assume, example, given
from hypothesis import strategies as st
from programs import programs
from specs import RENDERER, TILED, source, spec_of, spec_over

from epigen import dtypes, ops, settings
from epigen.codegen import schedules, tile
from epigen.codegen.completion import finishing_step, finishing_threads
from epigen.codegen.lower import kernel_name, lower
from epigen.codegen.partitions import partitions
from epigen.codegen.render import Rendered, Renderer
from epigen.codegen.schedules import SCHEDULES
from epigen.codegen.spec import LAYOUTS, KernelConfig, KernelSpec, Signature
from epigen.dtypes import BF16, FP8E4M3, FP16, FP32, INT8
from epigen.ir.check import check
from epigen.ir.graph import BITS, PACKED
from epigen.ir.passes import normalise
from epigen.lang.parser import parse

GOLDEN = checkout.GOLDEN / "kernels"

LIBRARY = schedules.config("library", block_m=8, block_n=128, num_warps=4)


# -- golden kernels

KERNELS: dict[str, tuple[KernelSpec, KernelConfig]] = {
    "relu_bias": (spec_of("relu(mm + bias)", k_multiple=64), TILED),
    "relu_bias_any_k": (spec_of("relu(mm + bias)"), TILED),
    "relu_and_mask": (spec_of("z = mm + bias; relu(z), bitmask(z > 0)", k_multiple=64), TILED),
    "unaligned_rows": (
        spec_of(
            "dz = drelu(mm, mask) * scale_a[m]; dz, bitmask(dz > 0)",
            factors=(("K", 4), ("N", 8), ("stride_am", 4), ("stride_bk", 8), ("stride_dz_m", 8)),
            bytewise=("mask", "out1"),
        ),
        TILED,
    ),
    "drelu_and_bgrad": (spec_of("dz = drelu(mm, mask); dz, bgrad(dz)", k_multiple=64), TILED),
    "drelu_and_bgrad_over_a_product": (spec_over("dz = drelu(mm, mask); dz, bgrad(dz)", BF16), LIBRARY),
    "three_finishing_kernels": (
        spec_of(
            "z = gelu(mm); scale_out = amax(z); lse = logsumexp(z, n) + scale_a[m]; db = sum(z, m) * 0.5 + sum(b, k); z, db, lse, scale_out", k_multiple=64
        ),
        TILED,
    ),
    "split_k": (spec_of("z = mm + bias; relu(z), bgrad(z)"), split_k()),
    "prefetch": (
        spec_of("z = mm * alpha + bias + residual; z, bitmask(z > scale_a[m])", k_multiple=64),
        tiled(16, 32, 64, 2, 1, group_m=1, prefetch=1),
    ),
    "prefetch_in_subtiles": (
        spec_of("dz = drelu(mm + bias, mask); dz, bgrad(dz)", layout="nt", tma=("a", "b", "dz"), k_multiple=64),
        persistent(128, 128, 64, 8, flatten=0, subtiles=2, prefetch=1),
    ),
    "prefetch_cooperative": (
        spec_of("relu(mm + bias)", layout="nt", tma=("a", "b", "out"), k_multiple=64),
        warp_specialized(128, 256, 64, 4, subtiles=2, prefetch=1),
    ),
    "persistent": (spec_of("relu(mm + bias)", layout="nt", tma=("a", "b", "out"), k_multiple=64), persistent(128, 128, 64, 8, flatten=0)),
    "persistent_in_subtiles": (
        spec_of("z = mm + bias; relu(z), bitmask(z > 0), bgrad(z), sum(z, n)", layout="tn", tma=("a", "b")),
        persistent(128, 256, 64, 8, subtiles=2),
    ),
    "cooperative": (spec_of("relu(mm + bias)", layout="nt", tma=("a", "b", "out"), k_multiple=64), warp_specialized(128, 256, 64, 4, subtiles=2)),
    "cooperative_promoted": (
        spec_of("relu(mm * scale_a[m] * scale_b[n])", FP8E4M3, input_dtype=FP32, layout="nt", tma=("a", "b", "out"), k_multiple=128),
        warp_specialized(128, 256, 128, 4, subtiles=2),
    ),
    "cooperative_split_k": (
        spec_of("relu(mm + bias)", layout="nt", tma=("a", "b", "out"), k_multiple=64),
        warp_specialized(128, 128, 64, 4, subtiles=2, splits=3),
    ),
    "pingpong": (
        spec_of("z = gelu_tanh(mm + bias); z, bitmask(z > 0), max(z, n) * 2, logsumexp(z, n)", layout="tn", tma=("a", "b", "out0")),
        warp_specialized(128, 128, 64, 4, pingpong=1),
    ),
    "fused_finalize": (
        spec_of("dz = drelu(mm, mask) * scale_b[n]; dz, bgrad(dz) * scale_b[n] + sum(b, k), sum(dz, n), amax(dz)", index_bits=64, k_multiple=64),
        tiled(64, 128, 32, 4, 3, fused_finalize=1),
    ),
    "pingpong_fused_finalize": (
        spec_of("dz = drelu(mm, mask); dz, bgrad(dz), amax(dz)", layout="nt", tma=("a", "b", "dz")),
        warp_specialized(128, 128, 64, 4, pingpong=1, prefetch=1, fused_finalize=1),
    ),
    "tma_loaded": (
        spec_of("dz = dgelu(mm, z[m,n]) + residual; dz, bgrad(dz)", layout="nt", tma=("a", "b", "z", "dz")),
        warp_specialized(128, 128, 64, 4, pingpong=1, tma_load=1),
    ),
    "tma_loaded_in_subtiles": (
        spec_of("relu(mm + bias + residual)", layout="nt", tma=("a", "b", "residual", "out")),
        warp_specialized(128, 128, 64, 4, subtiles=2, tma_load=1),
    ),
    "tma_loaded_through_own_buffers": (
        spec_of("silu(mm) * gate[m,n] + residual", layout="nt", tma=("a", "b", "gate", "residual", "out")),
        warp_specialized(128, 128, 64, 3, pingpong=1, subtiles=2, tma_load=1),
    ),
    "tma_loaded_in_turn": (
        spec_of("silu(mm) * gate[m,n] + residual", layout="nt", tma=("a", "b", "gate", "residual", "out")),
        warp_specialized(128, 128, 64, 5, pingpong=1, subtiles=4, tma_load=1),
    ),
    "library": (spec_of("z = mm + bias; silu(z) * gate[m,n], bgrad(z)"), LIBRARY),
    "vendors_own": (spec_of("z = mm; z"), LIBRARY),
    "int8_scaled": (spec_of("cast(mm * scale_a[m] * scale_b[n], fp16)", INT8, input_dtype=FP32, k_multiple=64), TILED),
    "int8_bare": (spec_of("mm", INT8, k_multiple=64), TILED),
    "fp8_saturating": (spec_of("cast(mm * alpha, fp8e4m3)", FP8E4M3, input_dtype=FP32, k_multiple=64), TILED),
    "fp32_tf32_by_value": (spec_of("leaky_relu(mm, slope) * (1 + slope)", FP32, ("slope",), precision="tf32", k_multiple=64), TILED),
    "batch": (spec_of("z = mm + bias; relu(z), bgrad(z)", k_multiple=64, batched=True), TILED),
    "batch_persistent": (
        spec_of("z = mm + residual; z, bgrad(z)", layout="nt", tma=("a", "b", "z"), batched=True),
        persistent(128, 128, 64, 8, flatten=0, subtiles=2, fused_finalize=1),
    ),
    "batch_pingpong": (
        spec_of("relu(mm * scale_b[n] + residual)", layout="nt", tma=("a", "b", "residual", "out"), batched=True),
        warp_specialized(128, 128, 64, 4, pingpong=1, subtiles=2, tma_load=1),
    ),
    "two_products": (spec_of("silu(mm) * dot(a, up[k,n])", k_multiple=64), TILED),
    "two_products_persistent": (
        spec_of("u = dot(a, up[k,n]) + bias; silu(mm) * u, u", layout="nt", tma=("a", "b", "up", "out0", "u"), k_multiple=64),
        persistent(128, 128, 64, 8, flatten=0, subtiles=2),
    ),
    "two_products_cooperative": (
        spec_of("silu(mm) * dot(a, up[k,n])", layout="nt", tma=("a", "b", "up", "out"), k_multiple=64),
        warp_specialized(128, 128, 64, 4, subtiles=2),
    ),
    "two_products_promoted": (
        spec_of("silu(mm) * dot(a, up[k,n])", FP8E4M3, layout="nt", tma=("a", "b", "up", "out"), k_multiple=64),
        warp_specialized(128, 64, 128, 3, pingpong=1, subtiles=2),
    ),
    "computed_operand": (spec_of("relu(dot(relu(a) * norm[k], b) + bias)", k_multiple=64), TILED),
    "carried": (spec_of("r = rsqrt(mean(a * a, k) + 1e-06); dot(a * norm[k], b) * r, r", k_multiple=64), TILED),
    "carried_any_k_persistent": (
        spec_of("mm - max(a * u[k], k) + sum(exp(b), k), amax(b * b, k)", tma=("a", "b", "out0")),
        persistent(flatten=0),
    ),
    "computed_operands_any_k": (
        spec_of("z = dot(silu(a) * row[m], exp(b) * scale_b[k,n]) * row[m]; z, bgrad(z)", index_bits=64),
        split_k(prefetch=1, fused_finalize=1),
    ),
    "positions": (spec_of("z = where(n <= m, mm, -inf); z, logsumexp(z, n) - m * scale_a[m]", k_multiple=64), tiled(64, 64, 32, fused_finalize=1)),
    "periods": (
        spec_of("z = mm + pos[m % P, n]; z, sum(z, n) * row[m % P]", index_bits=64, factors=(("N", 8), ("stride_pos_m", 8))),
        tiled(64, 64, 32, prefetch=1),
    ),
    "positions_in_subtiles": (
        spec_of("mm - slope[m] * (m - n)", layout="nt", tma=("a", "b", "out"), k_multiple=64),
        warp_specialized(128, 128, 64, 4, subtiles=2),
    ),
    "dropout": (spec_of("dropout(relu(mm + bias), p, seed)", by_value=("p",), k_multiple=64), tiled(64, 64, 32, prefetch=1)),
    "wide_offsets": (spec_of("mm + residual, sum(mm, n)", index_bits=64, k_multiple=64), TILED),
}


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_are_the_golden_ones(name: str, update_golden: bool) -> None:
    path = GOLDEN / f"{name}.txt"
    found = RENDERER.render(*KERNELS[name]).text
    if update_golden:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(found, encoding="utf-8")
    assert found == path.read_text(encoding="utf-8")


def test_no_golden_file_is_left_over() -> None:
    assert {p.stem for p in GOLDEN.iterdir()} == set(KERNELS)


@pytest.mark.parametrize("width", [16, 32, 64, 128, 256])
def test_what_the_last_completes_is_held_once(width: int) -> None:
    """16 values a thread of [step, width], each by one of 128 threads: down lie only those that are left over across."""
    (finish,) = spec_of("mm, bgrad(mm)", layout="nt", tma=("a", "b")).finishes
    config = warp_specialized(64, width, 64, 2, pingpong=1, fused_finalize=1)
    threads, warps = finishing_threads("n", config)
    assert threads[0] * threads[1] == 32 and warps[0] * warps[1] == 4 and threads[1] * warps[1] == min(128, width)
    assert finishing_step(finish, config) == min(128, 16 * 128 // width)
    assert finishing_threads("m", config) == ([1, 32], [2, 2])


def test_the_three_finishing_kernels_are_there() -> None:
    rendered = RENDERER.render(*KERNELS["three_finishing_kernels"])
    assert [f.finish.indices for f in rendered.functions if f.finish] == ["n", "m", ""]


# -- strategies


@st.composite
def specs(draw: st.DrawFn) -> KernelSpec:
    graph = normalise(check(parse(draw(programs()))))
    operand = draw(st.sampled_from(dtypes.OPERANDS))
    inputs = tuple((n.name, draw(st.sampled_from(dtypes.OPERANDS if n.indices else (None, FP32, FP16)))) for n in graph.inputs())
    precision = draw(st.sampled_from(("ieee", "tf32"))) if operand == FP32 else "ieee"
    factors = tuple(
        (name, draw(st.sampled_from((1, 2, 4, 8)))) for name in draw(st.sets(st.sampled_from(("K", "M", "N", "stride_am", "stride_bn", "stride_mm_m"))))
    )
    packed = [n.name for n in graph.inputs() if n.op == BITS] + [o.name for o in graph.outputs if graph.nodes[o.node].kind == PACKED]
    bytewise = tuple(draw(st.sets(st.sampled_from(packed)))) if packed else ()
    bits, multiple = draw(st.sampled_from((32, 64))), draw(st.sampled_from((1, 16, 256)))
    layout = draw(st.sampled_from(LAYOUTS))
    tma = tuple(draw(st.sets(st.sampled_from(["a", "b", *(o.name for o in graph.outputs), *graph.tiles()]))))
    return lower(graph, Signature(operand, operand, inputs, precision, multiple, bits, layout, tma, factors, bytewise))


@st.composite
def configs(draw: st.DrawFn, *of: str) -> KernelConfig:
    schedule = draw(st.sampled_from(of or sorted(SCHEDULES)))
    values = {name: draw(st.sampled_from(values)) for name, values in SCHEDULES[schedule].dimensions.items()}
    assume(not (values.get("flatten") and (values["fused_finalize"] or values["prefetch"])))
    return schedules.config(schedule, **values)


# -- bytes and digests


@given(specs(), configs())
def test_equal_spec_and_config_render_equal_bytes(spec: KernelSpec, config: KernelConfig) -> None:
    first, second = RENDERER.render(spec, config), RENDERER.render(spec, config)
    assert first.text.encode() == second.text.encode()
    assert first.digest == second.digest


def test_equal_bytes_in_every_process() -> None:
    # sets and hashes of strings have another order in each process
    code = f"import runpy; here = runpy.run_path({__file__!r}); print(*(here['RENDERER'].render(*k).digest for k in here['KERNELS'].values()))"
    environment = settings.child_environment(interpret=False)
    digests = {
        subprocess.run([sys.executable, "-c", code], env=environment | {"PYTHONHASHSEED": seed}, check=True, capture_output=True, text=True).stdout
        for seed in ("1", "2", "3")
    }
    assert digests == {" ".join(RENDERER.render(*k).digest for k in KERNELS.values()) + "\n"}


MASKED = "dz = drelu(mm, mask); dz, bgrad(dz)"


class Shelf(dict[str, str]):
    """Texts under names, in memory."""

    def read(self, name: str) -> str | None:
        return self.get(name)

    def write(self, name: str, text: str) -> None:
        self[name] = text


def test_templates_are_compiled_once_for_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, shelf = spec_of(MASKED), Shelf()
    text = Renderer(settings.templates_dir(), shelf).render(spec, TILED).text
    assert text == RENDERER.render(spec, TILED).text and len(shelf) >= 3

    def compiled(*_: Any, **__: Any) -> None:
        raise AssertionError("a template is compiled again")

    monkeypatch.setattr(jinja2.Environment, "compile", compiled)
    assert Renderer(settings.templates_dir(), shelf).render(spec, TILED).text == text


@pytest.mark.parametrize("damage", ["", "not base64!", "AAAA", "cut"])
def test_a_damaged_compiled_template_is_made_anew(damage: str) -> None:
    spec, shelf = spec_of(MASKED), Shelf()
    text = Renderer(settings.templates_dir(), shelf).render(spec, TILED).text
    whole = dict(shelf)
    for name, kept in whole.items():
        shelf[name] = kept[: len(kept) // 8 * 4] if damage == "cut" else damage
    assert Renderer(settings.templates_dir(), shelf).render(spec, TILED).text == text and shelf == whole


def test_an_edited_template_is_compiled_anew(tmp_path: Path) -> None:
    spec, shelf, own = spec_of(MASKED), Shelf(), tmp_path / "templates"
    shutil.copytree(settings.templates_dir(), own)
    before = Renderer(own, shelf).render(spec, TILED).text
    module = own / "module.py.j2"
    module.write_text(module.read_text() + "# edited\n")
    assert Renderer(own, shelf).render(spec, TILED).text.rstrip().endswith("# edited") and "# edited" not in before


def test_where_nothing_can_be_written_templates_are_compiled_all_the_same() -> None:
    class Full(Shelf):
        def write(self, name: str, text: str) -> None:
            """No folder can be written."""

    assert Renderer(settings.templates_dir(), Full()).render(spec_of(MASKED), TILED).text == RENDERER.render(spec_of(MASKED), TILED).text


@given(configs(), configs())
def test_another_config_has_another_digest(first: KernelConfig, second: KernelConfig) -> None:
    assume(first != second)
    spec = KERNELS["relu_and_mask"][0]
    assert RENDERER.render(spec, first).digest != RENDERER.render(spec, second).digest


@pytest.mark.parametrize("config", [TILED, LIBRARY, split_k(), persistent(flatten=0), warp_specialized()], ids=lambda c: c.schedule)
def test_each_dimension_counts_in_the_digest(config: KernelConfig) -> None:
    spec = KERNELS["relu_bias"][0]
    seen = {RENDERER.render(spec, config).digest}
    for name, value in config.values:
        other = next(v for v in SCHEDULES[config.schedule].dimensions[name] if v != value)
        seen.add(RENDERER.render(spec, schedules.config(config.schedule, **dict(config.values) | {name: other})).digest)
    assert len(seen) == 1 + len(config.values)


@pytest.mark.parametrize(
    "other",
    [
        spec_of("relu(mm - bias)"), spec_of("relu(mm + bias)", dtypes.BF16), spec_of("relu(mm + bias)", input_dtype=FP32), spec_of("relu(mm + bias)", k_multiple=64), spec_of("relu(mm + bias)", index_bits=64),
        spec_of("relu(mm + bias)", factors=(("N", 8),)), spec_of("relu(mm + bias)", factors=(("stride_am", 2),)), spec_of("cast(relu(mm + bias), fp32)"), spec_of("y = relu(mm + bias); y"), spec_of("relu(mm + gate[n])"), spec_of("relu(mm + bias[m])"),
    ],
)  # fmt: skip
def test_another_spec_has_another_digest(other: KernelSpec) -> None:
    assert RENDERER.render(other, TILED).digest != RENDERER.render(spec_of("relu(mm + bias)"), TILED).digest


def test_precision_counts_in_the_digest_of_fp32() -> None:
    ieee, tf32 = (RENDERER.render(spec_of("mm", FP32, precision=p), TILED).digest for p in ("ieee", "tf32"))
    assert ieee != tf32


# -- readable, valid text


def complaints(text: str) -> list[str]:
    """Unused arguments and locals, undefined and twice defined names of each function of a module."""
    module = ast.parse(text)
    defined = {f.name for f in module.body if isinstance(f, ast.FunctionDef)}
    defined |= {alias.asname or alias.name for n in module.body if isinstance(n, ast.Import | ast.ImportFrom) for alias in n.names}
    defined |= {t.id for n in module.body if isinstance(n, ast.Assign) for t in n.targets if isinstance(t, ast.Name)}
    found = []
    for function in (f for f in module.body if isinstance(f, ast.FunctionDef)):
        arguments = [a.arg for a in function.args.args]
        # that an extent takes 64 bits is neither a use of it nor another value
        statements = [s for s in function.body if not re.fullmatch(r"(\w+) = tl\.cast\(\1, tl\.int64\)", ast.unparse(s))]
        body = [n for statement in statements for n in ast.walk(statement)]
        loaded = {n.id for n in body if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
        # a counter that only counts is a loop's due
        counters = {n.target.id for n in body if isinstance(n, ast.For) and isinstance(n.target, ast.Name)}
        stored = {n.id for n in body if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        updated = {n.target.id for n in body if isinstance(n, ast.AugAssign) and isinstance(n.target, ast.Name)}
        found += [f"{function.name}: unused argument {a}" for a in arguments if a not in loaded]
        found += [f"{function.name}: unused local {n}" for n in stored - loaded - updated - counters]
        found += [f"{function.name}: undefined {n}" for n in loaded - stored - set(arguments) - defined if not hasattr(builtins, n)]
        # an assignment in a loop's body may repeat the name it starts from; the lines of the epilogue are single assignments
        targets = [t.id for s in statements if isinstance(s, ast.Assign) for t in s.targets if isinstance(t, ast.Name)]
        reductions = {t.id for n in body if isinstance(n, ast.For) for s in n.body if isinstance(s, ast.Assign) for t in s.targets if isinstance(t, ast.Name)}
        if not any(isinstance(s, ast.Return) for s in function.body):  # helpers may build a result in steps
            found += [f"{function.name}: argument {n} is assigned" for n in stored & set(arguments)]
            found += [f"{function.name}: {n} is assigned twice" for n in {t for t in targets if targets.count(t) > 1} - reductions]
    if re.search(r"[ \t]+$", text, re.MULTILINE):
        found.append("trailing blanks")
    if not text.endswith("\n") or text.endswith("\n\n"):
        found.append("no single newline at the end")
    if re.search(r"\n{4,}", text) or re.search(r":\n\n", text):
        found.append("stray blank lines")
    return found


def arguments_disagree(rendered: Rendered) -> list[str]:
    """The functions' records and the text have to list the same arguments, in the same order."""
    functions = {f.name: f for f in ast.parse(rendered.text).body if isinstance(f, ast.FunctionDef)}
    found = []
    for f in rendered.functions:
        in_text = [a.arg for a in functions[f.name].args.args]
        if in_text != f.names:
            found.append(f"{f.name}: {in_text} != {f.names}")
    return found


@given(specs(), configs("warp_specialized"))
def test_each_partition_is_passed_what_it_takes(spec: KernelSpec, config: KernelConfig) -> None:
    rendered = RENDERER.render(spec, config)
    planned = partitions(spec, config, rendered.functions[0])
    functions = {f.name: f for f in ast.parse(rendered.text).body if isinstance(f, ast.FunctionDef)}
    for partition, name in ((planned.producer, "producer"), (planned.consumer, "consumer")):
        assert [a.arg for a in functions[name].args.args] == [*partition.parameters, *partition.constants]
        assert [a.arg for a in functions[name].args.args if a.annotation] == [*partition.constants]
        for arguments in partition.arguments:
            assert len(arguments) == len(partition.parameters) + len(partition.constants)
            for parameter, argument in zip((*partition.parameters, *partition.constants), arguments, strict=True):
                # itself, one group's share of what each has its own of, or the number of the group
                assert (
                    argument == parameter
                    or re.fullmatch(rf"{parameter}s\.index\([01]\)", argument)
                    or (parameter, argument) in {("WARPGROUP", "0"), ("WARPGROUP", "1")}
                )
    first, second = (" ".join(arguments) for arguments in planned.consumer.arguments)
    assert first.replace(".index(0)", ".index(1)").replace(" 0 ", " 1 ") == second


@given(specs(), configs())
def test_random_programs_render_to_sound_text(spec: KernelSpec, config: KernelConfig) -> None:
    rendered = RENDERER.render(spec, config)
    assert complaints(rendered.text) == []
    assert arguments_disagree(rendered) == []


_UNITS = ("word", "byte", "kept_word", "kept_byte")
OFFSETS = {"offs_m", "offs_n", "offs_row", "offs_col", "offs_sum", "in_tile"}.union(*({f"offs_{u}", f"offs_{u}_m", f"in_{u}s", f"columns_{u}"} for u in _UNITS))
"""All names that a main kernel may declare of a tile's offsets and masks."""


def offsets_in(text: str, function: str, offsets: set[str]) -> list[tuple[set[str], set[str]]]:
    """Of a function, or of each of its loops over the subtiles of a tile: the offsets and masks that it declares, and those that it uses.

    A use before the declaration is of a name that is none."""
    (found,) = (f for f in ast.parse(text).body if isinstance(f, ast.FunctionDef) and f.name == function)
    loops: list[ast.AST] = [n for n in ast.walk(found) if isinstance(n, ast.For) and ast.unparse(n.target) == "subtile_id"]
    scopes = []
    for scope in loops or [found]:
        names = [n for n in ast.walk(scope) if isinstance(n, ast.Name) and n.id in offsets]
        declared = {n.id: n.lineno for n in names if isinstance(n.ctx, ast.Store)}
        used = {n.id if n.lineno > declared.get(n.id, 0) else f"{n.id} before its line" for n in names if isinstance(n.ctx, ast.Load)}
        scopes.append((set(declared), used))
    return scopes


def assert_declares_what_it_uses(spec: KernelSpec, config: KernelConfig) -> None:
    rendered = RENDERER.render(spec, config)
    schedule, declared = SCHEDULES[config.schedule], tile.declared(spec, config)
    # a kernel with descriptors numbers its tiles by their number along m in any case
    offsets = OFFSETS if schedule.descriptors else OFFSETS | {"tiles_m"}
    in_text = offsets_in(rendered.text, "consumer" if schedule.architecture == "hopper" else rendered.functions[0].name, offsets)
    assert all(written == used for written, used in in_text)
    told = [declared.before, declared.after] if len(in_text) == 2 else [declared.before | declared.after]
    assert [written for written, _ in in_text] == told


@given(specs(), configs())
def test_a_kernel_declares_each_offset_that_it_uses_and_no_other(spec: KernelSpec, config: KernelConfig) -> None:
    assume(not spec.bare_product or SCHEDULES[config.schedule].multiplies)
    assert_declares_what_it_uses(spec, config)


# of two-valued dimensions half of the combinations, which have all values of any three together
_HALVES = {n: [v for v in itertools.product((0, 1), repeat=n) if sum(v) % 2 == 0] for n in (3, 4, 5)}
_EPILOGUES = [
    *(tiled(prefetch=p, fused_finalize=f, group_m=1 + g) for p, f, g in _HALVES[3]),
    *(split_k(prefetch=p, fused_finalize=f, group_m=1 + g) for p, f, g in _HALVES[3]),
    *(schedules.config("library", block_m=8, block_n=64, num_warps=4, fused_finalize=f) for f in (0, 1)),
    *(persistent(flatten=0, subtiles=1 + s, tma_store=t, fused_finalize=f, prefetch=p) for s, t, f, p in _HALVES[4]),
    *(warp_specialized(pingpong=g, subtiles=1 + s, tma_load=t, fused_finalize=f, prefetch=p) for g, s, t, f, p in _HALVES[5]),
    *(warp_specialized(pingpong=g, subtiles=4, tma_load=t, fused_finalize=g, prefetch=(g + t) % 2) for g in (0, 1) for t in (0, 1)),
    *(warp_specialized(subtiles=1 + s, prefetch=p, fused_finalize=1, splits=2) for s in (0, 1) for p in (0, 1)),
]  # fmt: skip


@pytest.mark.parametrize("rows", ["whole words", "bytes"])
@pytest.mark.parametrize(
    "text",
    [
        "relu(mm + bias)", "mm * scale_a[m]", "mm + residual", "sum(mm, m)", "sum(mm, n)", "sum(mm)", "sum(mm, m), sum(mm)", "dz = drelu(mm, mask); dz, bgrad(dz)", "bitmask(mm > 0)", "bitmask(mm > bias)", "bitmask(mm > scale_a[m]), residual",
        "bitmask(mask), sum(where(bits(mask), mm, 0))", "z = mm + bias + residual; relu(z), bitmask(z > scale_a[m]), bgrad(z), sum(z, n)",
    ],
)  # fmt: skip
def test_each_epilogue_declares_each_offset_that_it_uses_and_no_other(text: str, rows: str) -> None:
    graph = normalise(check(parse(text)))
    names = ("residual", "mask", *(o.name for o in graph.outputs))
    spec = spec_of(text, tma=("a", "b", *names), bytewise=names if rows == "bytes" else ())
    for config in _EPILOGUES:
        assert_declares_what_it_uses(spec, config)


@pytest.mark.parametrize("config", [TILED, LIBRARY], ids=lambda c: c.schedule)
@pytest.mark.parametrize(
    "text",
    [
        "mm", "mm, bias + scale_a[m] + 0 * mm", "sum(mm)", "max(mm, m)", "amax(mm, n)", "sum(gate[m,n], m), mm", "sum(a, k), mm", "sum(b, k), mm", "sum(a, k) + sum(mm, n)", "sum(b, k) * bias, sum(mm, m)", "amax(a, k), amax(b, k), mm",
        "bitmask(mm > 0)", "bitmask(mask), mm", "bitmask(mm > 0), sum(mm, m)", "where(mask, mm, 0)", "where(1 > 2, mm, 0)", "mm * alpha", "sum(mm) * alpha", "sum(mm, m) * alpha, mm * alpha", "residual, mm", "residual, sum(mm, n)",
        "mm + 0.1 * bias", "sum(mm * scale_a[m], n) * scale_a[m]", "logsumexp(mm, m), logsumexp(mm, n), logsumexp(mm)", "cast(sum(mm, m), int8)", "cast(mm, int8) + cast(mm, fp8e5m2)", "sum(mm, m), sum(a, k), max(mm)", "gelu_tanh(sum(mm))",
        "out = mm + bias; relu(out)", "out1 = mm + 1; relu(out1), out1 * 2, out1 * 3", "y = cast(relu(mm), fp16); y, sum(y), exp(relu(mm))", "max(mm), maximum(mm, 0)", "tanh(mm) + tanh(bias), tanh(sum(mm))", "relu(mm), relu(mm)", "sum(mm, m), sum(mm, m)",
    ],
)  # fmt: skip
@pytest.mark.parametrize("k_multiple", [1, 64])
def test_each_form_renders_to_sound_text(text: str, config: KernelConfig, k_multiple: int) -> None:
    for a in (FP16, INT8):
        for by_value in ((), ("alpha",)):
            rendered = RENDERER.render(spec_of(text, a, by_value, FP16, k_multiple=k_multiple), config)
            assert complaints(rendered.text) == []
            assert arguments_disagree(rendered) == []


@pytest.mark.parametrize("op", ops.TABLE.values(), ids=lambda op: op.name)
def test_each_operation_renders_to_sound_text(op: ops.Op) -> None:
    for pool in (("mm", "bias", "residual"), ("bias", "mm", "0.5"), ("0.5", "alpha", "mm")):
        args = [x if p.kind == ops.NUMBER else f"({x} > 0)" for p, x in zip(op.params, pool, strict=False)]
        text = f"{op.name}({', '.join(args)})" if not op.symbol else f"{args[0]} {op.symbol} {args[1]}" if len(args) == 2 else f"{op.symbol}{args[0]}"
        text = f"mm + ({text})" if op.result == ops.NUMBER else f"where({text}, mm, 0)"
        for by_value in ((), ("alpha",)):
            assert complaints(source(text, by_value=by_value)) == []


# -- names


@pytest.mark.parametrize(
    ("text", "zero"),
    [
        ("dz = drelu(mm, mask); dz, bgrad(dz)", True),
        ("sum(where(bits(mask) & (mm > 0), mm * s, 0), m)", True),
        ("sum(-gate[m,n] + scale_a[m], m)", True),
        ("amax(cast(drelu(mm, mask), bf16), m)", True),
        ("bgrad(mm)", False),  # 0 * inf
        ("bgrad(drelu(mm, mask) * scale_b[n])", False),
        ("bgrad(drelu(mm, ~bits(mask)))", False),
        ("sum(where(mm > 0, gate[m,n], mm), m)", False),
        ("max(drelu(mm, mask), m)", False),  # all may be below 0
        ("sum(drelu(mm, mask), n)", False),  # of rows, not columns
    ],
)
def test_rows_that_are_zero_anyway_are_not_masked_once_more(text: str, zero: bool) -> None:
    found = source(text if "mm" in text else f"mm, {text}")
    assert bool(re.search(r"_in = tl\.where\((offs_m < M|offs_n < N), ", found)) is not zero


def test_a_value_that_is_used_twice_is_looked_at_once() -> None:
    """Else each of these lines would double the work."""

    def work(lines: int) -> int:
        chain = "; ".join(f"x{i} = tanh(x{i - 1}) + x{i - 1} * 0.5" for i in range(1, lines))
        return calls(lambda: spec_of(f"x0 = tanh(mm); {chain}; x{lines - 1}, bgrad(x{lines - 1})"))

    assert work(12) < 3 * work(6)
    assert work(40) < 5 * work(12)


def test_names_of_the_user_are_the_kernels_names() -> None:
    text = source("hidden = mm + bias; active = silu(hidden); gated = active * gate[m,n]; total = sum(gated, m); gated, total * 2")
    for line in ("hidden = acc + bias", "active = silu(hidden)", "gated = active * gate", "gated_ptr", "total_partial_ptr"):
        assert line in text


@given(specs())
def test_each_label_is_a_name_of_the_text(spec: KernelSpec) -> None:
    text = RENDERER.render(spec, TILED).text
    for line in (*spec.lines, *(line for f in spec.finishes for line in f.lines)):
        assert re.search(rf"^    {line.name} = ", text, re.MULTILINE)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("relu(mm + bias)", "epigen_relu_mm_bias"),
        ("mm", "epigen_mm"),
        ("z = mm + bias; relu(z)", "epigen_z_mm_bias_relu"),
        ("mm * 1e-05", "epigen_mm"),
        ("mm + 0x1f", "epigen_mm"),
    ],
)
def test_the_functions_name_tells_the_program(text: str, name: str) -> None:
    graph = check(parse(text))
    assert kernel_name(graph.text) == name
    assert f"def {name}(" in source(text)


@given(programs())
def test_a_functions_name_is_short_and_valid(text: str) -> None:
    name = kernel_name(check(parse(text)).text)
    assert re.fullmatch(r"epigen_[a-z]\w*", name)
    assert len(name) <= 60
    assert not name.endswith("_")


def test_long_programs_have_their_own_names() -> None:
    texts = [f"relu(mm + bias) * first_long_name + second_long_name * third_long_name + {i}" for i in range(5)]
    assert len({kernel_name(t) for t in texts}) == 5


def test_the_header_shows_the_program_and_its_arguments() -> None:
    header, _, _ = source("z = mm + bias; relu(z), bitmask(z > 0)").partition("import triton")
    for words in ("# z = mm + bias\n", "# relu(z), bitmask(z > 0)\n", "bias_ptr", "[N] fp16", "[M, K] fp16", "tiled block_m=64", "accumulated in fp32"):
        assert words in header


@example(text="mm + 0.1")
@given(text=programs())
def test_the_header_holds_comments_alone(text: str) -> None:
    # a program's text must not be able to leave its comment
    header, found, _ = source(text).partition("import triton\n")
    assert found
    assert all(line.startswith("#") for line in header.splitlines())


# -- what the way from a text to a kernel costs

_COUNTING = """
import random, statistics, sys
from counting import calls
from programs import write_program
from epigen import settings
from epigen.codegen import schedules, tile
from epigen.codegen.lower import lower
from epigen.codegen.render import Renderer
from epigen.codegen.spec import Signature
from epigen.dtypes import FP16
from epigen.ir.check import check
from epigen.ir.passes import normalise
from epigen.lang.parser import parse

renderer = Renderer(settings.templates_dir())
config = schedules.config("tiled", block_m=64, block_n=64, block_k=32, group_m=8, num_warps=4, num_stages=3)
texts = [t for t in (write_program(random.Random(seed)) for seed in range(2000)) if len([n for n in check(parse(t)).nodes if n.args]) >= 20][:60]

def render(text):
    graph = normalise(check(parse(text)))
    renderer.render(lower(graph, Signature(FP16, FP16, tuple((n.name, FP16) for n in graph.inputs()))), config)

counts = [calls(lambda: render(text)) for text in texts]
assert "torch" not in sys.modules and "triton" not in sys.modules, "the front end needs neither"
print(len(texts), statistics.median(counts))
"""


def test_the_front_end_takes_some_thousand_calls_and_no_torch() -> None:
    """bench.front has it in milliseconds."""
    environment = settings.child_environment(interpret=False)
    done = subprocess.run([sys.executable, "-c", _COUNTING], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    count, median = done.stdout.split()
    assert int(count) == 60
    assert float(median) < 12_000
