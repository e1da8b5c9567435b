"""A real training run on real data: a multilayer perceptron learns to read scikit-learn's digits, by epigen and by eager torch.

Run: python -m bench.digits [--dtypes NAME ...] [--epochs N] [--device cuda|cpu] [--commit HASH] [--out FOLDER]
Wants scikit-learn, and matplotlib for the plot (pip install "epigen[bench]"). fp16 and bf16 train under autocast, fp16 with a GradScaler.
Claim, from the same parameters, over the same batches, with the same optimizer: the loss curves agree within rounding, and the digits that were
not trained on are read as well in the end.
What rounding does is measured: eager torch trains in float64 as well, and with its hidden units in other orders, which is the same network with
its sums rounded otherwise. If two runs are each no farther from float64's curve than the farthest of eager torch's, they are no more than twice
as far from each other: that is the tolerance.
In the end McNemar's exact test does not tell the two networks apart at 5 %: of the images that one of them alone reads rightly, each has its
share. And the numbers read rightly differ by no more than 1 % of the images. In fp32 all runs read the same number. The numbers of eager torch's
other orders are no measure of bf16: on a GPU its products sum in fp32, whatever the order, and round once.
Source: Q. McNemar, Psychometrika 12 (1947) 153-157; for two classifiers on one test set: T. G. Dietterich, Neural Computation 10 (1998) 1895-1923.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import epigen
from bench import networks, record
from bench.record import Report

SIZES = (64, 256, 128, 10)
BATCH, HELD_OUT, ORDERS = 64, 360, 7
SEED = 0
SIGNIFICANT, SLACK = 0.05, 0.01
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True)
class Digits:
    """x: [images, 64] fp32, 0 to 1. y: [images], what they show. The last `held_out` are not trained on."""

    x: Tensor
    y: Tensor
    held_out: int = HELD_OUT


@dataclass(frozen=True, slots=True)
class Trained:
    """losses: of each step, before it. read: which images of those held out are read rightly in the end."""

    losses: tuple[float, ...]
    read: tuple[bool, ...]

    @property
    def right(self) -> int:
        return sum(self.read)

    def apart(self, other: Trained) -> float:
        """The largest distance of two curves."""
        return max(abs(a - b) for a, b in zip(self.losses, other.losses, strict=True))

    def alone(self, other: Trained) -> int:
        """How many images it reads rightly and the other does not."""
        return sum(mine and not theirs for mine, theirs in zip(self.read, other.read, strict=True))


def digits(device: str) -> Digits:
    """All 1797, in an order drawn once. Ends the script where scikit-learn is missing."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise SystemExit(f'this wants scikit-learn: pip install "epigen[bench]" ({error})') from None
    found = load_digits()
    order = torch.randperm(len(found.target), generator=torch.Generator().manual_seed(SEED))
    return Digits((torch.tensor(found.data, dtype=torch.float32) / 16)[order].to(device), torch.tensor(found.target)[order].to(device))


def start(by_epigen: bool = False) -> nn.Sequential:
    """The network before its training: after the same seed the parameters are the same."""
    torch.manual_seed(SEED)
    return epigen.nn.MLP(SIZES) if by_epigen else networks.plain(SIZES)


def reordered(model: nn.Sequential, seed: int) -> nn.Sequential:
    """The same network with its hidden units in another order."""
    layers = [m for m in model if isinstance(m, nn.Linear)]
    drawing = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for one, following in itertools.pairwise(layers):
            order = torch.randperm(one.out_features, generator=drawing)
            one.weight.copy_(one.weight[order])
            one.bias.copy_(one.bias[order])
            following.weight.copy_(following.weight[:, order])
    return model


def trained(model: nn.Sequential, data: Digits, dtype: torch.dtype, epochs: int) -> Trained:
    """Train in place. dtype: of the products; parameters are fp32, or float64 with float64."""
    kind, half = data.x.device.type, dtype in (torch.float16, torch.bfloat16)
    model = model.to(data.x.device, torch.float64 if dtype == torch.float64 else torch.float32)
    x = data.x.to(next(model.parameters()).dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler(kind, enabled=dtype == torch.float16)
    cast = torch.autocast(kind, dtype if half else None, enabled=half)
    drawing, count = torch.Generator().manual_seed(SEED), len(x) - data.held_out
    losses = []
    for _ in range(epochs):
        for rows in torch.randperm(count, generator=drawing).to(x.device).split(BATCH):
            with cast:
                logits = model(x[rows])
            loss = nn.functional.cross_entropy(logits.to(x.dtype), data.y[rows])
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.detach())
    with torch.no_grad(), cast:
        read = model(x[count:]).argmax(1)
    return Trained(tuple(torch.stack(losses).tolist()), tuple((read == data.y[count:]).tolist()))


def mcnemar(one: int, other: int) -> float:
    """The exact test's p: how likely fair coins, one for each image that one network alone reads rightly, part so unevenly or more."""
    tail = sum(math.comb(one + other, i) for i in range(min(one, other) + 1))
    return min(1.0, 2 * tail / 2 ** (one + other))


def as_well(ours: Trained, eager: Trained) -> bool:
    """Whether the images that were held out do not tell the two apart."""
    near = abs(ours.right - eager.right) <= SLACK * len(eager.read)
    return near and mcnemar(ours.alone(eager), eager.alone(ours)) > SIGNIFICANT


def compared(name: str, data: Digits, exact: Trained, epochs: int) -> dict[str, Any]:
    """One dtype. exact: eager torch's run in float64."""
    dtype = DTYPES[name]
    ours = trained(start(by_epigen=True), data, dtype, epochs)
    eager = trained(start(), data, dtype, epochs)
    others = [trained(reordered(start(), seed), data, dtype, epochs) for seed in range(1, ORDERS + 1)]
    rounding = max(one.apart(exact) for one in (eager, *others))
    apart, right = ours.apart(eager), [one.right for one in (eager, *others)]
    alone = {"epigen": ours.alone(eager), "eager": eager.alone(ours)}
    accuracy = {ours.right} == set(right) if dtype == torch.float32 else as_well(ours, eager)
    return {
        "dtype": name, "losses": {"epigen": _rounded(ours), "eager": _rounded(eager)}, "right": {"epigen": ours.right, "eager": right, "float64": exact.right},
        "right_alone": alone, "mcnemar_p": mcnemar(*alone.values()),
        "apart": apart, "from_float64": {"epigen": ours.apart(exact), "eager": rounding}, "tolerance": 2 * rounding,
        "holds": {"curves": apart <= 2 * rounding, "accuracy": accuracy},
    }  # fmt: skip


def _rounded(run: Trained) -> list[float]:
    """fp32 has no more digits."""
    return [float(f"{loss:.9g}") for loss in run.losses]


def line(row: dict[str, Any], held_out: int) -> str:
    right, alone, holds = row["right"], row["right_alone"], row["holds"]
    return (
        f"{row['dtype']}: {right['epigen']} of {held_out} read rightly by epigen, {', '.join(map(str, right['eager']))} by eager torch, "
        f"{alone['epigen']} and {alone['eager']} by one alone, p {row['mcnemar_p']:.2g}: {holds['accuracy']}; "
        f"losses no more than {row['apart']:.2e} apart, tolerance {row['tolerance']:.2e}: {holds['curves']}"
    )


def measure(data: Digits, dtypes: Sequence[str], epochs: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """A row a dtype, and what is said of all."""
    rows: list[dict[str, Any]] = []
    exact = trained(start(), data, torch.float64, epochs)
    for name in dtypes:
        rows.append(row := compared(name, data, exact, epochs))
        print(line(row, data.held_out), flush=True)
    holds = all(held for row in rows for held in row["holds"].values())
    return rows, {"device": data.x.device.type, "sizes": SIZES, "batch": BATCH, "epochs": epochs, "held_out": data.held_out, "holds": holds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", choices=tuple(DTYPES), default=list(DTYPES))
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    record.add_options(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)  # products are small: threads would wait for each other longer than they compute
    rows, about = measure(digits(options.device), options.dtypes, options.epochs)
    print(f"claimed: {about['holds']}")
    report = Report("bench.digits", record.environment(options.commit), rows, about)
    print(record.write(f"digits_{options.device}", report, options.out))
    if importlib.util.find_spec("matplotlib") is None:
        print("no plot: matplotlib is not installed")
        return
    from bench import figures

    print(*figures.digits(report, options.out), sep="\n")


if __name__ == "__main__":
    main()
