"""Suites of problems to tune, and what else is asked for: every combination once, and mistakes in words, all together and with their place."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkout import ROOT
from golden import Golden
from machines import Machine

import epigen
from epigen.db.problem import capability, problem_of
from epigen.dtypes import BF16, FP8E4M3, FP16, FP32, INT8, UINT8
from epigen.errors import CallError, CheckError, SuiteError, TuneError
from epigen.gpus import TARGETS
from epigen.tuning import request, suite

SHIPPED, MODELS = ROOT / "bench" / "suite_h200.toml", ROOT / "bench" / "suite_models.toml"


def told(text: str) -> str:
    with pytest.raises(SuiteError) as caught:
        suite.parse(text, "my.toml")
    return str(caught.value)


def test_an_entry_stands_for_every_combination() -> None:
    found = suite.parse(
        '[[problem]]\nprogram = ["relu(mm)", "gelu(mm + bias)"]\nshapes = ["1x2x3", "4x5x6"]\ndtype = ["fp16", "bf16"]\nlayout = ["nt", "nn"]\n'
        '[[problem]]\nprogram = "mm"\nshapes = "7x8x9"\ndtype = "fp32"\nprecision = "tf32"\n'
        '[[problem]]\nprogram = "mm"\nshapes = "7x8x9"\ninvariant = "m"\n'
    )
    assert len(found) == 2 * 2 * 2 * 2 + 2 and found.pop().invariant == "m"
    assert [(a.graph.text, a.shape, a.a.name, a.layout) for a in found[:3]] == [
        ("relu(mm)", (1, 2, 3), "fp16", "nt"), ("relu(mm)", (1, 2, 3), "fp16", "nn"), ("relu(mm)", (1, 2, 3), "bf16", "nt"),
    ]  # fmt: skip
    assert (found[-1].shape, found[-1].a.name, found[-1].layout, found[-1].precision) == ((7, 8, 9), "fp32", "nt", "tf32")


def test_by_default_a_problem_is_fp16_with_a_transposed_weight() -> None:
    (found,) = suite.parse('[[problem]]\nprogram = "relu(mm)"\nshapes = ["1x2x3"]')
    assert (found.a.name, found.layout, found.precision) == ("fp16", "nt", "ieee")


def test_a_problem_that_comes_twice_is_tuned_once() -> None:
    """However it is written: names and spelling of a program, torch's name of a dtype, a precision that says nothing of fp16."""
    found = suite.parse(
        '[[problem]]\nprogram = ["relu(mm + bias)", "y = relu( mm+shift[n] ); y"]\nshapes = ["1x2x3", "1x2x3"]\ndtype = ["fp16", "float16"]\n'
        '[[problem]]\nprogram = "relu(mm + bias)"\nshapes = ["1x2x3", "3x2x1"]\nprecision = "tf32"\n'
    )
    assert [(a.graph.text, a.shape) for a in found] == [("relu(mm + bias)", (1, 2, 3)), ("relu(mm + bias)", (3, 2, 1))]
    both = [request.every(["mm"], ["1x1x1"], ["fp32"], precision=p) for p in ("ieee", "tf32")]
    assert len(request.distinct(both[0] + both[1])) == 2


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("", "empty"),
        ("problem = 3", "3"),
        ("problem = []", "no problem"),
        ("problem = [1]", "a list of numbers"),
        ('[problem]\nprogram = "mm"', "a table"),
        ('[[problem]]\nprogram = "relu(mm)"', "no shapes"),
        ('[[problem]]\nprogram = "mm"\nshapes = []', "no shape"),
        ('[[problem]]\nprogram = 3\nshapes = "1x1x1"', "program=3"),
        ('[[problem]]\nprogram = "mm"\nshapes = ["1x1x1", "64x64"]', "64x64"),
        ('[[problem]]\nprogram = "mm"\nshapes = "1x1x1"\ndtype = "fp61"', "fp61"),
        ('[[problem]]\nprogram = "mm"\nshapes = "1x1x1"\ndtype = "int32"', "int32"),
        ('[[problem]]\nprogram = "mm"\nshapes = "1x1x1"\nlayout = "nm"', "nm"),
        ('[[problem]]\nprogram = "mm"\nshapes = "1x1x1"\nprecision = "high"', "high"),
        ('[[problem]]\nprogram = "mm"\nshapes = "1x1x1"\ninvariant = "n"', "invariant=n"),
        ('[[problem]]\nprogram = "mm"\nshapes = [' + '"1x1x1",' * 1001 + "]", "1001 shapes"),
        ('[[problem]]\nprogram = "' + "\\n" * 20_001 + '"\nshapes = "1x1x1"', "a long program"),
        ('[[problem]]\nprogram = "mm"\nshapes = "1x1x1"\nlayouts = "nn"', "layouts"),
        ('[[problem]]\nprogram = "mm"\nshapes = "1x1x1"\nx = 1', "x"),
    ],
)  # fmt: skip
def test_a_mistake_is_named_with_file_entry_and_field(text: str, name: str, golden: Golden) -> None:
    golden(told(text), name)


def test_a_mistake_in_a_program_keeps_its_caret() -> None:
    assert told('[[problem]]\nprogram = ["relu(mm)", "relu(mm + bais)"]\nshapes = "1x1x1"').startswith(
        "my.toml: problem 1, program, item 2:\n  CheckError: unknown name 'bais'\n    relu(mm + bais)\n              ^^^^\n    did you mean bias?"
    )


def test_all_mistakes_come_together() -> None:
    lines = told('x = 1\n[[problem]]\nprogram = "mm"\nshapes = "1"\ndtype = ["a", "fp16", 3]\n[[problem]]\nshapes = "1x1x1"').splitlines()
    first = " problem 1 (mm)"
    assert [line.split(":")[1] for line in lines] == [f"{first}, shapes", f"{first}, dtype, item 1", f"{first}, dtype, item 3", " problem 2, program", " x"]


@pytest.mark.parametrize(
    "content",
    [b"x", b"\xff\xfe", b"[[problem]", b"a = " + b"[" * 100_000, b"problem = " + b"9" * 5000, b"\0"],
    ids=["no pair", "no UTF-8", "cut off", "deep", "digits", "NUL"],
)
def test_what_is_no_suite_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "my.toml"
    path.write_bytes(content)
    with pytest.raises(SuiteError, match=r"my\.toml"):
        suite.read(path)


def test_more_than_anybody_tunes_is_refused_before_it_is_written_out(golden: Golden) -> None:
    many = "[" + '"1x1x1",' * 1000 + "]"
    dtypes, layouts = "[" + '"fp16",' * 1000 + "]", "[" + '"nn",' * 1000 + "]"
    text = f'[[problem]]\nprogram = "mm"\nshapes = {many}\ndtype = {dtypes}\nlayout = {layouts}'
    golden(told(text))


def test_a_file_without_an_end_is_not_read_whole(monkeypatch: pytest.MonkeyPatch, golden: Golden) -> None:
    monkeypatch.setattr(suite, "_MOST_BYTES", 1000)
    with golden.raises(SuiteError):
        suite.read(Path("/dev/zero"))


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, golden: Golden) -> None:
    with golden.raises(SuiteError):
        suite.read(tmp_path)


def test_the_suite_of_models_has_their_layers() -> None:
    """From one token on, in 16 and in 8 bits: gates, residuals and what is divided by a scale."""
    found = suite.read(MODELS)
    tasks = [a.task(TARGETS["sm_90"]) for a in found]
    assert len({t.problem for t in tasks}) == len(tasks) >= 90
    assert {t.a.name for t in tasks} == {"bf16", "fp8e4m3", "int8"} and {t.shape[0] for t in tasks} >= {1, 16, 256, 8192, 65536}


def test_the_shipped_suite_is_what_its_database_is_tuned_on() -> None:
    found = suite.read(SHIPPED)
    assert len(found) >= 80
    target = TARGETS["sm_90"]
    for a in found:
        task = a.task(target)
        assert task.spec.outputs
    forward = ("relu(mm + bias)", "z = mm + bias; relu(z), bitmask(z > 0)", "gelu(mm + bias)", "z = mm + bias; gelu(z), z")
    backward = ("dz = drelu(mm, mask); dz, bgrad(dz)", "dz = dgelu(mm, z[m,n]); dz, bgrad(dz)")
    derived = epigen.derive("relu(mm + bias)", dtype="bf16").forward.text
    assert {a.graph.text for a in found} == {*forward, *backward, "mm", "mm + bias", derived}
    assert {(a.graph.text, a.a.name) for a in found if a.shape == (65536, 8192, 16384)} == {(p, t) for p in (*forward, *backward) for t in ("fp16", "bf16")}
    # a weight as it lies is what a gradient by the input multiplies with
    assert {a.layout for a in found if a.graph.text in backward} == {"nn", "nt"} and {a.layout for a in found if a.graph.text in forward} == {"nt"}
    assert sum(a.a.name == "bf16" for a in found) > len(found) / 3


# -- what is asked for in code


@pytest.mark.parametrize("given", ["16x4096x1024", (16, 4096, 1024), [16, 4096, 1024], torch.Size((16, 4096, 1024))])
def test_a_shape_is_text_or_three_numbers(given: object) -> None:
    assert request.shape_of(given) == (16, 4096, 1024)


@pytest.mark.parametrize("given", ["16x4096", "16X4096x1024", " 1x1x1", (16, 4096), (16, 4096, 1024.0), (True, 1, 1), (-1, 1, 1), 7, None])
def test_what_is_no_shape_is_refused(given: object) -> None:
    with pytest.raises(CallError, match="MxNxK"):
        request.shape_of(given)


@pytest.mark.parametrize("given", ["bf16", "bfloat16", "torch.bfloat16", torch.bfloat16])
def test_a_dtype_has_several_names(given: object) -> None:
    assert request.dtype_of(given) == "bf16"


def test_inputs_beside_8_bit_operands_are_fp32() -> None:
    for dtype, inputs in (("fp16", FP16), ("fp8e4m3", FP32), ("int8", FP32)):
        (one,) = request.every(["mm"], ["1x1x1"], [dtype])
        assert one.task(TARGETS["sm_90"]).inputs == (inputs,)


@pytest.mark.parametrize("given", ["int8", "torch.int8", torch.int8])
def test_a_weight_of_fewer_bits_is_tuned_as_a_call_has_it(given: object) -> None:
    (one,) = request.every(["mm * s[n]"], ["16x256x256"], ["bf16"], weights=[given])
    assert (one.a, one.b, one.inputs) == (BF16, INT8, (BF16,))
    task = one.task(TARGETS["sm_90"])
    assert (
        task.problem == problem_of(task.graph, task.spec, (16, 256, 256), TARGETS["sm_90"].part, capability(TARGETS["sm_90"])) and task.spec.signature.b == INT8
    )
    text = '[[problem]]\nprogram = "mm * s[n]"\nshapes = "16x256x256"\ndtype = "bf16"\nweight = ["int8", "fp8e4m3"]\n'
    assert [r.b for r in suite.parse(text)] == [INT8, FP8E4M3] and suite.parse(text)[0] == one
    (packed,) = request.every(["dot(a, int4(b) * s[k/128,n])"], ["16x256x256"], ["bf16"])
    assert packed.b == UINT8


def test_what_is_no_weight_is_refused(golden: Golden) -> None:
    with golden.raises(CallError, "int5"):
        request.every(["mm"], ["1x1x1"], weights=["int5"])
    with golden.raises(CallError, "fp8 beside fp8"):
        request.every(["mm"], ["1x1x1"], ["int8"], weights=["fp8e4m3"])[0].task(TARGETS["sm_90"])


def test_programs_are_checked_before_anything_runs(golden: Golden) -> None:
    with golden.raises(CheckError, "bais"):
        request.every(["relu(mm)", "mm + bais"], ["1x1x1"])
    with golden.raises(CallError, "int"):
        request.every([3], ["1x1x1"])  # type: ignore[list-item]
    with golden.raises(CallError, "high"):
        request.every(["mm"], ["1x1x1"], precision="high")


def test_gpus_are_chosen_by_index() -> None:
    h100 = TARGETS["sm_90"]
    three = Machine({1: h100, 0: h100, 2: TARGETS["sm_80"]})
    assert request.gpus_for(None, three) == ((1,), h100)
    assert request.gpus_for((0, 1, 0), three) == ((0, 1), h100)
    for wanted, said in (
        ("all", "the GPUs differ (0 is H100, H200, 2 is A100): tune each kind by itself"),
        ((3, 0, 4), "there is no GPU 3, 4: this machine has 0, 1, 2"),
        ("both", "devices are 'all' or their indices, and 'both' was given"),
        ((), "no device is named to tune on"),
    ):
        with pytest.raises(TuneError) as caught:
            request.gpus_for(wanted, three)
        assert str(caught.value) == said
    assert request.gpus_for("all", Machine({1: h100, 0: h100})) == ((0, 1), h100)


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path: Path) -> None:
    """As some editors leave one."""
    file = tmp_path / "suite.toml"
    text = b"[[problem]]\nprogram = 'relu(mm)'\nshapes = ['64x64x64']\n"
    file.write_bytes(text)
    plain = suite.read(file)
    file.write_bytes(b"\xef\xbb\xbf" + text)
    assert suite.read(file) == plain != []
