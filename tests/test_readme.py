"""README and docs are true: their tables are the stored results, their Python examples run, their commands exist. So are the tables of bench/README.md."""

from __future__ import annotations

import os
import re
from pathlib import Path

import forked
import pytest
from click.testing import CliRunner

import epigen
from bench import readme
from epigen.cli import main
from epigen.tuning import suite

DOCS = sorted((readme.README.parent / "docs").glob("*.md"))
TEXT = "\n".join(document.read_text() for document in (readme.README, *DOCS))


def test_tables_are_the_stored_results() -> None:
    for document in readme.DOCUMENTS:
        text = document.read_text()
        assert readme.filled(text) == text, "run: python -m bench.readme"


def test_every_block_stands_once_and_every_link_leads_somewhere() -> None:
    texts = {document: document.read_text() for document in readme.DOCUMENTS}
    assert sorted(re.findall(r"<!-- (\w+) -->", "".join(texts.values()).replace("<!-- end -->", ""))) == sorted(readme.BLOCKS)
    texts |= {document: document.read_text() for document in DOCS}
    links = [(document, link) for document, text in texts.items() for link in re.findall(r"\]\(([^)#]+)\)", text)]
    assert len(links) >= 4 and [link for document, link in links if not (document.parent / link).exists()] == []


CHECKS = {
    'fused = epigen.compile("relu(mm + bias)")\ny = fused(x, weight.T, bias=bias)  # x [M, K], weight.T [K, N]: one kernel': "assert y.shape == z.shape == (64, 256)",
    "compiled = torch.compile": "assert all(p.grad is not None for p in model.parameters())",
    "mlp = epigen.nn.MLP": "assert gate.grad.shape == (512, 256) and mlp(x).shape == (512, 10)",
    "backward = epigen.compile": "assert y.shape == dz.shape == (64, 256) and mask.shape == (64, 32) and db.shape == (256,)",
    "scores = epigen.compile": "assert torch.allclose(out, q @ k.mT * 0.125 + bias, atol=1e-4)",
    "unit = epigen.compile": "assert out.shape == (100, 128) and torch.allclose(out[10:75], unit(rows[10:75], experts[2].T), atol=1e-5)",
    "fused = epigen.compile(gated)": "assert y.shape == (2, 64, 256) and fused.program == 'silu(mm + bias) * gate[m]'",
    "rounded = epigen.nn.QuantizedLinear": "assert y.shape == (4, 256) and of_checkpoint.in_features == 512 and rounded.qweight.shape == (256, 256)",
    "moe = epigen.nn.MoE": "assert all(p.grad is not None for p in moe.parameters()) and moe(tokens).shape == tokens.shape",
    "epigen.nn.float8(model": "assert isinstance(model[0], epigen.nn.Float8Linear) and model[0].weight.grad is not None and type(model[2]) is torch.nn.Linear",
    "q_proj = torch.nn.RMSNorm": "assert q.shape == (2, 16, 128) and all(t.grad is not None for t in (hidden, norm.weight, q_proj.weight))",
    "optimizer = torch.optim": "assert losses[-1] < 0.95 * losses[0] and y.shape == (512, 256) and y.requires_grad",
}
"""By a line of each example, what holds after it."""


@pytest.mark.triton
@pytest.mark.parametrize("line", CHECKS, ids=range(len(CHECKS)))
def test_python_examples_run_as_written(line: str) -> None:
    examples = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    assert len(examples) == len(CHECKS)
    (example,) = (e for e in examples if line in e)
    # torch's own compiler imports what it says to leave
    ran = forked.python("-W", "error", "-W", "ignore::DeprecationWarning", "-c", f"{example}\n{CHECKS[line]}\n", cwd=Path.cwd(), env=os.environ)
    assert ran.returncode == 0, ran.stderr


def test_gradients_are_those_that_are_derived() -> None:
    (asked,) = re.findall(r'`epigen.derive\("(.*?)"\)`', TEXT)
    shown = re.findall(r"^    (.*?) +# derived\.(forward|backward): ", TEXT, re.MULTILINE)
    derived = epigen.derive(asked)
    assert shown == [(derived.forward.text, "forward"), (derived.backward.text, "backward")]


@pytest.mark.triton
def test_commands_run_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = re.findall(r'^    epigen ((?:compile|explain) "[^"]*".*?|ops|info)(?:\s+#.*)?$', TEXT, re.MULTILINE)
    assert len(commands) == 9
    monkeypatch.chdir(tmp_path)
    for command in commands:
        words = [a or b for a, b in re.findall(r'"([^"]*)"|(\S+)', command)]
        # that kernels are verified is shown elsewhere; here only that the words are understood
        result = CliRunner().invoke(main, [*words, *(["--no-verify"] if words[0] == "compile" else [])])
        assert result.exit_code == 0, (command, result.output)


def test_error_example_is_what_is_printed() -> None:
    shown = re.search(r"^    CheckError: .*?\n\n", TEXT, re.MULTILINE | re.DOTALL)
    assert shown
    result = CliRunner().invoke(main, ["compile", "relu(mm + bais)"])
    assert result.exit_code == 1
    assert result.stderr.strip() == "\n".join(line[4:] for line in shown[0].strip("\n").split("\n"))


def test_suite_example_is_a_suite() -> None:
    (example,) = re.findall(r"^    \[\[problem\]\]\n(?:    .*\n)+", TEXT, re.MULTILINE)
    found = suite.parse("".join(line[4:] for line in example.splitlines(keepends=True)))
    assert len(found) == 4 and {a.a.name for a in found} == {"bf16"}
