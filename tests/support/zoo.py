"""Models that people have, small and with random weights: one function a model, which gives it with inputs to call it with.

What a model comes from is imported inside its function, so that a package that is missing costs its own models alone. Each gives the same weights and
inputs whenever it is called.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # as torch's own documentation has it

VOCABULARY, BATCH, LENGTH, WIDTH, HIDDEN = 61, 2, 6, 32, 64


@dataclass(frozen=True)
class Made:
    """mlps: a pattern that the names of the linear layers of its MLPs, and no others, end with."""

    model: nn.Module
    inputs: Mapping[str, Any]
    mlps: str

    def layers(self) -> list[str]:
        """The linear layers of its MLPs, by name."""
        return [name for name, _ in self.model.named_modules() if re.search(rf"\b({self.mlps})$", name)]

    def loss(self) -> Tensor:
        """One number of the model's first result."""
        return scalar(self.model(**self.inputs))


def scalar(result: Any) -> Tensor:
    """A loss of what a model gives, which hangs on each element in another way: after a norm the mean of squares is always 1."""
    tensor = first(result).float()
    return (tensor * torch.arange(tensor.numel(), device=tensor.device).view(tensor.shape).sin()).mean()


def first(result: Any) -> Tensor:
    """The tensor that a model's result begins with."""
    while not isinstance(result, Tensor):
        result = next(iter(result.values())) if isinstance(result, Mapping) else result[0]
    return result


ZOO: dict[str, Callable[[], Made]] = {}
"""By name. A model whose package is not installed raises ImportError when it is made."""

NEEDS: dict[str, str] = {}
"""The package of each model that needs one."""


def _listed(package: str = "") -> Callable[[Callable[[], Made]], Callable[[], Made]]:
    def wrapped(make: Callable[[], Made]) -> Callable[[], Made]:
        def seeded() -> Made:
            if package:  # transformers too imports torchvision, where that is installed
                with quiet():
                    allow_torchvision()
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                made = make()
            made.model.eval()
            return made

        ZOO[make.__name__] = seeded
        if package:
            NEEDS[make.__name__] = package
        return seeded

    return wrapped


def missing(name: str) -> str:
    """'' or the package that a model needs and that is not installed."""
    packages = {"": (), "timm": ("timm", "torchvision")}.get(NEEDS.get(name, ""), (NEEDS.get(name, ""),))
    return next((package for package in packages if importlib.util.find_spec(package) is None), "")


_DECLARED: list[Any] = []


def allow_torchvision() -> None:
    """Have torchvision's wheel for CUDA, which is what PyPI has, imported beside a torch for CPUs.

    Its own operators cannot be loaded there, and its import describes what two of them return: they are declared here, without an implementation. Whoever
    called one would be told that it has none; no model here does.
    """
    if _DECLARED or "torchvision" in sys.modules or importlib.util.find_spec("torchvision") is None:
        return
    try:
        importlib.import_module("torchvision")
    except RuntimeError as error:
        if "does not exist" not in str(error):
            raise
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _DECLARED.append(library)
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        importlib.import_module("torchvision")


@contextmanager
def quiet() -> Iterator[None]:
    """While a package is imported and a model is made, whose warnings are not ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _drawn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _tokens(length: int = LENGTH, seed: int = 1) -> Tensor:
    return torch.randint(3, VOCABULARY, (BATCH, length), generator=torch.Generator().manual_seed(seed))


def _transformers() -> Any:
    with quiet():
        allow_torchvision()
        return importlib.import_module("transformers")


# -- of transformers

_DECODER: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": HIDDEN, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False,
}  # fmt: skip
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


@_listed("transformers")
def bert() -> Made:
    t = _transformers()
    config = t.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=32,
        **_NO_DROPOUT,
    )
    return Made(t.BertModel(config), {"input_ids": _tokens(), "attention_mask": torch.ones(BATCH, LENGTH)}, r"layer\.\d+\.(intermediate|output)\.dense")


@_listed("transformers")
def gpt2() -> Made:
    t = _transformers()
    config = t.GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=WIDTH,
        n_layer=2,
        n_head=4,
        n_positions=32,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        bos_token_id=1,
        eos_token_id=2,
    )
    return Made(t.GPT2LMHeadModel(config), {"input_ids": _tokens()}, r"mlp\.(c_fc|c_proj)")


@_listed("transformers")
def llama() -> Made:
    t = _transformers()
    return Made(t.LlamaForCausalLM(t.LlamaConfig(**_DECODER)), {"input_ids": _tokens()}, "gate_proj|up_proj|down_proj")


@_listed("transformers")
def qwen2() -> Made:
    t = _transformers()
    return Made(t.Qwen2ForCausalLM(t.Qwen2Config(**_DECODER)), {"input_ids": _tokens()}, "gate_proj|up_proj|down_proj")


@_listed("transformers")
def gemma2() -> Made:
    t = _transformers()
    config = t.Gemma2Config(**_DECODER, head_dim=8, sliding_window=8)
    return Made(t.Gemma2ForCausalLM(config), {"input_ids": _tokens()}, "gate_proj|up_proj|down_proj")


@_listed("transformers")
def phi3() -> Made:
    """Its gates are stacked on what they are multiplied with, and so are those of the next three."""
    t = _transformers()
    return Made(t.Phi3ForCausalLM(t.Phi3Config(**_DECODER)), {"input_ids": _tokens()}, "gate_up_proj|down_proj")


@_listed("transformers")
def glm() -> Made:
    t = _transformers()
    return Made(t.GlmForCausalLM(t.GlmConfig(**_DECODER, head_dim=8)), {"input_ids": _tokens()}, "gate_up_proj|down_proj")


@_listed("transformers")
def glm4() -> Made:
    t = _transformers()
    return Made(t.Glm4ForCausalLM(t.Glm4Config(**_DECODER, head_dim=8)), {"input_ids": _tokens()}, "gate_up_proj|down_proj")


@_listed("transformers")
def modernbert() -> Made:
    t = _transformers()
    options = {name: value for name, value in _DECODER.items() if name not in ("num_key_value_heads", "use_cache")}
    config = t.ModernBertConfig(**options, cls_token_id=1, sep_token_id=2)
    return Made(t.ModernBertModel(config), {"input_ids": _tokens()}, r"mlp\.(Wi|Wo)")


@_listed("transformers")
def vit() -> Made:
    t = _transformers()
    config = t.ViTConfig(hidden_size=WIDTH, intermediate_size=HIDDEN, num_hidden_layers=2, num_attention_heads=4, image_size=16, patch_size=8, **_NO_DROPOUT)
    return Made(t.ViTModel(config), {"pixel_values": _drawn(BATCH, 3, 16, 16)}, r"mlp\.(fc1|fc2)")


@_listed("transformers")
def clip() -> Made:
    t = _transformers()
    text = {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": HIDDEN,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 32,
    }
    text |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    image = {"hidden_size": WIDTH, "intermediate_size": HIDDEN, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 16, "patch_size": 8}
    config = t.CLIPConfig(text_config=text, vision_config=image, projection_dim=16)
    return Made(t.CLIPModel(config), {"input_ids": _tokens(), "pixel_values": _drawn(BATCH, 3, 16, 16)}, r"mlp\.(fc1|fc2)")


def _t5(feed_forward: str, mlps: str) -> Made:
    t = _transformers()
    config = t.T5Config(
        vocab_size=VOCABULARY, d_model=WIDTH, d_ff=HIDDEN, d_kv=8, num_layers=2, num_heads=4, dropout_rate=0.0, feed_forward_proj=feed_forward, use_cache=False
    )
    return Made(t.T5Model(config), {"input_ids": _tokens(), "decoder_input_ids": _tokens(4, seed=2)}, mlps)


@_listed("transformers")
def t5_relu() -> Made:
    return _t5("relu", "wi|wo")


@_listed("transformers")
def t5_gated() -> Made:
    return _t5("gated-gelu", "wi_0|wi_1|wo")


@_listed("transformers")
def mixtral() -> Made:
    """Its experts' weights are stacked, and no linear layers."""
    t = _transformers()
    return Made(t.MixtralForCausalLM(t.MixtralConfig(**_DECODER, num_local_experts=4)), {"input_ids": _tokens()}, "none")


@_listed("transformers")
def whisper() -> Made:
    t = _transformers()
    config = t.WhisperConfig(
        vocab_size=VOCABULARY, d_model=WIDTH, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=HIDDEN,
        decoder_ffn_dim=HIDDEN, num_mel_bins=8, max_source_positions=8, max_target_positions=16, dropout=0.0, use_cache=False, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    return Made(t.WhisperModel(config), {"input_features": _drawn(BATCH, 8, 16), "decoder_input_ids": _tokens(4)}, "fc1|fc2")


# -- of timm and torchvision


def _timm(name: str, **options: Any) -> nn.Module:
    with quiet():
        timm = importlib.import_module("timm")
        model: nn.Module = timm.create_model(name, pretrained=False, num_classes=5, **options)
    return model


_VIT: dict[str, Any] = {"img_size": 16, "patch_size": 8, "embed_dim": WIDTH, "depth": 2, "num_heads": 4}


@_listed("timm")
def timm_vit() -> Made:
    return Made(_timm("vit_tiny_patch16_224", **_VIT), {"x": _drawn(BATCH, 3, 16, 16)}, r"mlp\.(fc1|fc2)")


@_listed("timm")
def timm_convnext() -> Made:
    model = _timm("convnext_tiny", depths=(1, 1, 1, 1), dims=(8, 16, 24, 32), ls_init_value=0.5)
    return Made(model, {"x": _drawn(BATCH, 3, 32, 32)}, r"mlp\.(fc1|fc2)")


@_listed("timm")
def timm_mixer() -> Made:
    with quiet():
        mixer = importlib.import_module("timm.models.mlp_mixer")
        model = mixer.MlpMixer(num_classes=5, img_size=16, patch_size=8, embed_dim=WIDTH, num_blocks=2)
    return Made(model, {"x": _drawn(BATCH, 3, 16, 16)}, r"mlp_(tokens|channels)\.(fc1|fc2)")


@_listed("timm")
def timm_swin() -> Made:
    model = _timm("swin_tiny_patch4_window7_224", img_size=16, patch_size=2, window_size=4, embed_dim=16, depths=(1, 1), num_heads=(2, 2))
    return Made(model, {"x": _drawn(BATCH, 3, 16, 16)}, r"mlp\.(fc1|fc2)")


@_listed("timm")
def timm_eva02() -> Made:
    """A norm stands before the last layers of its MLPs, and nothing after them."""
    model = _timm("eva02_base_patch14_224", **_VIT)
    return Made(model, {"x": _drawn(BATCH, 3, 16, 16)}, r"mlp\.(fc1_g|fc1_x)")


@_listed("timm")
def timm_dinov2() -> Made:
    """Its MLPs are SwiGLUPacked."""
    return Made(_timm("vit_giant_patch14_dinov2", **_VIT), {"x": _drawn(BATCH, 3, 16, 16)}, r"mlp\.(fc1|fc2)")


@_listed("torchvision")
def torchvision_vit() -> Made:
    with quiet():
        models = importlib.import_module("torchvision.models")
        model = models.VisionTransformer(image_size=16, patch_size=8, num_layers=2, num_heads=4, hidden_dim=WIDTH, mlp_dim=HIDDEN, num_classes=5)
        nn.init.normal_(model.heads.head.weight)  # which is zero at first
    return Made(model, {"x": _drawn(BATCH, 3, 16, 16)}, r"mlp\.(0|3)")


# -- of convolutions, in memory where the channels of an element lie side by side


def _image(*shape: int) -> Tensor:
    return _drawn(*shape).to(memory_format=torch.channels_last)


def _torchvision(make: Callable[[Any], nn.Module]) -> nn.Module:
    with quiet():
        return make(importlib.import_module("torchvision.models")).to(memory_format=torch.channels_last)


@_listed("torchvision")
def torchvision_resnet() -> Made:
    """ResNet-50's blocks, two of the first width."""

    def make(models: Any) -> nn.Module:
        model: nn.Module = models.ResNet(models.resnet.Bottleneck, [2, 1, 1, 1], num_classes=5, width_per_group=16)
        return model

    return Made(_torchvision(make), {"x": _image(BATCH, 3, 64, 64)}, "none")


@_listed("torchvision")
def torchvision_mobilenet() -> Made:
    """MobileNetV3's three kinds of blocks: hard swish, squeeze and excite, and a residual."""

    def make(models: Any) -> nn.Module:
        blocks = ((16, 3, 16, 16, False, "RE", 1), (16, 5, 48, 24, True, "HS", 2), (24, 5, 64, 24, True, "HS", 1))
        model: nn.Module = models.MobileNetV3([models.mobilenetv3.InvertedResidualConfig(*block, 1, 1) for block in blocks], 64, num_classes=5, dropout=0.0)
        return model

    return Made(_torchvision(make), {"x": _image(BATCH, 3, 32, 32)}, "none")


@_listed("timm")
def timm_convnext_conv() -> Made:
    """Its MLPs are convolutions."""
    model = _timm("convnext_tiny", depths=(1, 1, 1, 1), dims=(8, 16, 24, 32), ls_init_value=0.5, conv_mlp=True)
    return Made(model.to(memory_format=torch.channels_last), {"x": _image(BATCH, 3, 32, 32)}, "none")


# -- of torch alone


@_listed()
def encoder() -> Made:
    """Its layers call linear layers and a function of torch's in methods of their own."""
    layer = nn.TransformerEncoderLayer(WIDTH, 4, HIDDEN, dropout=0.0, activation="gelu", batch_first=True)
    return Made(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), {"src": _drawn(BATCH, LENGTH, WIDTH)}, "linear1|linear2")


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.view(*x.shape[:-1], 4, -1).transpose(1, 2) for t in self.c_attn(x).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(x.shape))


class _Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_fc, self.c_proj = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(F.gelu(self.c_fc(x)))


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2, self.mlp = nn.LayerNorm(WIDTH), _Attention(), nn.LayerNorm(WIDTH), _Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class _Nano(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.h, self.ln_f, self.lm_head = nn.ModuleList(_Block() for _ in range(2)), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1], device=idx.device))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return logits, None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@_listed()
def nano() -> Made:
    """A GPT whose activation is a function in a forward."""
    return Made(_Nano(), {"idx": _tokens()}, r"mlp\.(c_fc|c_proj)")


class _Dlrm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(VOCABULARY, 16, mode="sum") for _ in range(3))
        self.bottom = nn.Sequential(nn.Linear(8, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 16), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(16 + 6, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1), nn.Sigmoid())

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        x = self.bottom(dense)
        features = torch.stack([x, *(table(sparse[:, i]) for i, table in enumerate(self.tables))], dim=1)
        rows, columns = torch.tril_indices(4, 4, -1)
        return self.top(torch.cat([x, (features @ features.mT)[:, rows, columns]], dim=1))


@_listed()
def dlrm() -> Made:
    sparse = torch.randint(VOCABULARY, (BATCH * LENGTH, 3, 2), generator=torch.Generator().manual_seed(1))
    return Made(_Dlrm(), {"dense": _drawn(BATCH * LENGTH, 8), "sparse": sparse}, r"(bottom|top)\.(0|2)")
