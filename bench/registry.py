"""THE table of claims: which script measures each, in the order in which they are run, and what it wants. Pure data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Claim:
    """name: on the command line. what: it claims. script: a module of bench, if it is not called as the claim. arguments: its own.

    gpus: how many it wants. recorded: whether it takes --commit and --out. needs: programs that must be installed.
    """

    name: str
    what: str
    script: str = ""
    arguments: tuple[str, ...] = ()
    gpus: int = 1
    recorded: bool = True
    needs: tuple[str, ...] = ()

    @property
    def module(self) -> str:
        return f"bench.{self.script or self.name}"


def _group(name: str, what: str, budget_s: int) -> Claim:
    return Claim(name, what, "headline", ("--group", name, "--budget", str(budget_s)))


CLAIMS = (
    Claim("differential", "kernels agree with a float64 oracle on the GPU"),
    Claim("memcheck", "they read and write what is theirs", needs=("compute-sanitizer",)),
    Claim("mutants", "a tuning database damaged in any way costs its damaged records alone", gpus=0),
    Claim("gem", "relu(mm + bias) at the shapes of the GEM paper, with the host's cost"),
    Claim("host", "what a call costs the Python thread, and a process's first call"),
    Claim("owners", "what epigen.fuse costs the Python thread, forward by forward of a few models' layers", gpus=0),
    Claim("headline", "the bars, a part of each, in under 5 minutes"),
    _group("epilogues", "six epilogues at every shape of the bars, against mm, eager torch and cuBLASLt", 900),
    Claim("compiled", "the same against torch.compile, which tunes for long"),
    _group("small", "three small products under a CUDA graph", 60),
    _group("skinny", "1 to 64 rows", 120),
    _group("odd", "extents that align with nothing", 120),
    _group("tuned", "random problems after tuning them, against eager torch and the vendor's fused products", 120),
    _group("untuned", "random problems that nobody tuned, against eager torch and the vendor's fused products", 120),
    Claim("batched", "several products in one launch, untuned, against torch.bmm"),
    Claim("tiles", "epilogues that read or write further [M, N] tensors, untuned or with `--tuned`, against torch.mm and the bytes' own time"),
    Claim("gated", "two products of one operand and what is computed of both, untuned or with `--tuned`, against torch.mm with twice the columns"),
    Claim("cross_entropy", "a last layer and its loss without logits in memory, against torch.mm, eager torch, torch.compile and Liger Kernel"),
    Claim("weights", "weights of 8 and 4 bits, untuned or with `--tuned`, against torch.mm with the same weight in bf16"),
    Claim(
        "sparse",
        "a 2:4 sparse weight by the vendor's product and one pass, untuned or with `--tuned`, against epigen's kernels of the dense values and torch's own sparse layer",
    ),
    Claim("block_scales", "fp8 with scales in blocks of k, untuned or with `--tuned`, against torch's own product with them"),
    Claim("quantized_outputs", "outputs in fp8 with a scale for each block of columns, untuned or with `--tuned`, against torch's products and torch.compile"),
    Claim("grouped", "products of groups of rows, as experts have them, against torch's grouped product and torch.compile"),
    Claim("experts", "layers of experts, forward and with gradients, against a loop, torch's grouped products and torch.compile"),
    Claim("eight_bit", "fp8 and int8 with scales and a bias, untuned, against cuBLAS's fp8 and bf16's product"),
    Claim("invariant", "rows have the same bits whatever M is, and what that costs, against ordinary kernels and torch.mm"),
    Claim("counters", "where the time of an epilogue goes, by the hardware's counters", needs=("ncu",)),
    Claim("power", "large products interleaved and each alone, where the power limit sets the clock"),
    Claim("ways", "which way to share a long product is the faster on every GPU of a kind"),
    Claim("fuzz", "30,000 programs, sound and hostile, are answered or refused in words by every stage", gpus=0),
    Claim("digits", "an MLP learns to read digits as it does in eager torch", gpus=0),
    Claim("training", "a training step and its memory, against eager torch, torch.compile and nvmath's epilogues"),
    Claim("models", "layers of transformers' models by torch.compile's backend, against eager torch and Inductor"),
    Claim("compilation", "how long torch.compile takes with epigen's backend, against Inductor alone, in processes of their own"),
    Claim(
        "compilation_whole",
        "the same of a model with all of its layers",
        "compilation",
        ("--models", "bert-large", "--layers", "24", "--rounds", "1", "--name", "compilation_whole"),
    ),
    Claim("sweep", "whole search spaces, for the claims about search and model"),
    Claim("front", "what epigen's own Python costs, beside importing torch: starting, from a text to a kernel, ranking, look-up", gpus=0),
    Claim("replay", "how soon a search finds a good config", gpus=0),
    Claim("model", "how well the model ranks configs", gpus=0, recorded=False),
    Claim("winner", "a search finds what measuring everything finds"),
    Claim("cold", "how long tuning takes with nothing cached"),
    Claim("repeat", "tuning again gives as fast a kernel"),
    Claim("borrow", "what a problem that was never tuned loses"),
    Claim("regret", "what random problems lose that nobody tuned, against a search of each"),
    Claim("devices", "what a second GPU gains for tuning", gpus=2),
    Claim("plot", "draws the searches", gpus=0, recorded=False),
    Claim("figures", "draws the headline, the roofline and the host's cost", gpus=0, recorded=False),
)
BY_NAME = {claim.name: claim for claim in CLAIMS}
