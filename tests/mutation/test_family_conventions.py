"""Each convention of each family, made wrong: the logits must then leave those of transformers.

So that none of the comparisons in tests/parity/test_families.py passes by accident.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from armillary.checkpoints.families import FAMILIES
from armillary.checkpoints.families.family import put
from armillary.checkpoints.huggingface import read_huggingface
from armillary.checkpoints.layouts import Groups, Layout, Rows, Same, Together, Turned, read_tensors
from armillary.checkpoints.parameters import parameter_shapes
from armillary.checkpoints.safetensors import read_sharded
from armillary.checkpoints.tensors import StoredTensor
from armillary.config import DecoderConfig
from armillary.weights import build_filled
from support import models
from support.peer_families import LENGTH, build_peer, in_float64
from support.peer_llama import save_peer, whole_pass

pytestmark = pytest.mark.peer

CLEARLY = 1e-2  # of logits that reach 9, where 1e-9 is let pass
FAMILY = {family.name: family for family in FAMILIES}
Tensors = dict[str, StoredTensor]


@dataclass(frozen=True)
class Fault:
    """Entries of the configuration, by path, layouts in the place of others, or tensors by name."""

    family: str
    variant: str
    entries: Mapping[str, Any] = field(default_factory=dict)
    layout: Callable[[Layout], Layout] | None = None
    renames: Mapping[str, str] = field(default_factory=dict)
    at_least: float = CLEARLY


def as_rows(layout: Layout) -> Layout:
    return Rows(layout.name, layout.ours) if isinstance(layout, Groups) else layout


def in_other_order(*order: int) -> Callable[[Layout], Layout]:
    def change(layout: Layout) -> Layout:
        if not isinstance(layout, Rows):
            return layout
        return Rows(layout.name, tuple(layout.ours[i] for i in order))

    return change


def norms_swapped(layout: Layout) -> Layout:
    return replace(layout, names=layout.names[::-1]) if isinstance(layout, Together) else layout


def square_not_turned(layout: Layout) -> Layout:
    """Matrices that are as high as wide fit either way (cases.md 82)."""
    turned = layout.ours[0].endswith("attention.out.weight")
    return Same("transformer.h.{i}.attn.c_proj.weight", layout.ours) if turned else layout


def columns_swapped(layout: Layout) -> Layout:
    is_pair = isinstance(layout, Turned) and len(layout.ours) == 2
    return replace(layout, ours=layout.ours[::-1]) if is_pair else layout


ROTARY = "layers.*.attention.rotary"
WINDOWS = "layers.*.attention.window"
EXPERT, ROUTER = "layers.*.feedforward.expert", "layers.*.feedforward.router"
FAULTS: dict[str, Fault] = {
    "llama: llama3 is passed over": Fault(
        "llama", "llama3", {f"{ROTARY}.scaling": {"kind": "default"}}
    ),
    "llama: interleaved": Fault("llama", "llama3", {f"{ROTARY}.layout": "interleaved"}),
    "llama: epsilon of others": Fault("llama", "llama3", {"layers.*.norm.eps": 0.1}),
    "mistral: no window": Fault("mistral", "window", {WINDOWS: None}),
    "mistral: a window of one more": Fault("mistral", "window", {WINDOWS: 8}),
    "qwen2: no window": Fault("qwen2", "window", {WINDOWS: None}),
    "qwen2: windows from the first layer on": Fault("qwen2", "window", {WINDOWS: 7}),
    "qwen2: windows in other layers": Fault(
        "qwen2", "window in some layers", {WINDOWS: [None, 7, None]}
    ),
    "qwen2: q, k and v without biases": Fault(
        "qwen2", "plain", {"layers.*.attention.qkv_bias": False}
    ),
    "qwen3: no q/k norm": Fault("qwen3", "plain", {"layers.*.attention.qk_norm": None}),
    "qwen3: norms of q and k exchanged": Fault(
        "qwen3", "plain", renames={"attention.q_norm": "attention.k_norm"}
    ),
    "gemma: weights are not less one": Fault(
        "gemma", "plain", {"layers.*.norm.offset": 0.0, "final_norm.offset": 0.0}
    ),
    "gemma: the final norm alone": Fault("gemma", "plain", {"final_norm.offset": 0.0}),
    "gemma: embeddings as they are": Fault("gemma", "plain", {"embedding_scale": 1.0}),
    "gemma: SiLU": Fault("gemma", "plain", {"layers.*.feedforward.activation": "silu"}),
    "gemma: GELU itself": Fault(
        "gemma", "plain", {"layers.*.feedforward.activation": "gelu"}, at_least=1e-5
    ),
    "gemma2: scores are not bounded": Fault(
        "gemma2", "plain", {"layers.*.attention.soft_cap": None}
    ),
    "gemma2: logits are not bounded": Fault("gemma2", "plain", {"final_soft_cap": None}),
    "gemma2: scores scaled by the head's width": Fault(
        "gemma2", "own scale", {"layers.*.attention.scale": None}
    ),
    "gemma2: windows in the other layers": Fault("gemma2", "plain", {WINDOWS: [None, 7, None]}),
    "gemma2: no norms of results": Fault("gemma2", "plain", {"layers.*.norm_placement": "pre"}),
    "gemma2: norms of results exchanged": Fault(
        "gemma2", "plain", renames={".post_norm1": ".post_norm2"}
    ),
    "gemma2: norms before and after exchanged": Fault(
        "gemma2", "plain", renames={".norm2": ".post_norm1"}
    ),
    "gemma3: one base for all layers": Fault("gemma3", "plain", {f"{ROTARY}.base": 1000.0}),
    "gemma3: no windows": Fault("gemma3", "plain", {WINDOWS: None}),
    "gemma3: windows in every second layer": Fault(
        "gemma3", "plain", {WINDOWS: [7, None, 7, None, 7, None, 7]}
    ),
    "gemma3: q/k norms that are not less one": Fault(
        "gemma3", "plain", {"layers.*.attention.qk_norm.offset": 0.0}
    ),
    "gemma3: sliding layers scaled too": Fault(
        "gemma3", "linear", {f"{ROTARY}.scaling": {"kind": "linear", "factor": 4.0}}
    ),
    "phi3: k before q": Fault("phi3", "plain", layout=in_other_order(0, 2, 1)),
    "phi3: short factors for long texts": Fault(
        "phi3", "longrope", {f"{ROTARY}.scaling.long_factor": (1.0, 1.1, 1.2, 1.3, 1.4)}
    ),
    "phi3: no attention factor": Fault(
        "phi3", "longrope", {f"{ROTARY}.scaling.explicit_attention_factor": 1.0}
    ),
    "phi3: whole heads rotate": Fault(
        "phi3",
        "partial longrope",
        {f"{ROTARY}": {"d_rotary": 10, "base": 100.0}},
    ),
    "phi3: no window": Fault("phi3", "window", {WINDOWS: None}),
    "olmo2: each head normed for itself": Fault(
        "olmo2", "plain", {"layers.*.attention.qk_norm_over": "head_own_weights"}
    ),
    "olmo2: norms of what is read": Fault(
        "olmo2",
        "plain",
        {"layers.*.norm_placement": "pre"},
        renames={".post_norm1": ".norm1", ".post_norm2": ".norm2"},
    ),
    "smollm3: all layers rotate": Fault(
        "smollm3", "plain", {ROTARY: {"d_rotary": 10, "base": 100.0}}
    ),
    "smollm3: windows passed over": Fault("smollm3", "windows", {WINDOWS: None}),
    "granite: embeddings as they are": Fault("granite", "plain", {"embedding_scale": 1.0}),
    "granite: scores by the head's width": Fault(
        "granite", "plain", {"layers.*.attention.scale": None}
    ),
    "granite: results as they are": Fault("granite", "plain", {"layers.*.residual_scale": 1.0}),
    "granite: logits multiplied": Fault("granite", "plain", {"logit_scale": 3.0}),
    "stablelm: RMSNorm": Fault(
        "stablelm",
        "plain",
        {
            f"{norm}.{key}": value
            for norm in ("layers.*.norm", "final_norm")
            for key, value in (("kind", "rms"), ("bias", False))
        },
    ),
    "stablelm: whole heads rotate": Fault("stablelm", "plain", {f"{ROTARY}.d_rotary": 10}),
    "stablelm: no biases": Fault("stablelm", "biases", {"layers.*.attention.qkv_bias": False}),
    "stablelm: no q/k norm": Fault(
        "stablelm",
        "parallel",
        {"layers.*.attention.qk_norm": None, "layers.*.attention.qk_norm_over": "head"},
    ),
    "stablelm: one sub-layer after the other": Fault(
        "stablelm",
        "parallel",
        {"layers.*.residual": "sequential"},
        renames={"+.norm1": ".norm2"},
    ),
    "gpt_neox: all q, all k, all v": Fault("gpt_neox", "plain", layout=as_rows),
    "gpt_neox: one sub-layer after the other": Fault(
        "gpt_neox", "plain", {"layers.*.residual": "sequential"}
    ),
    "gpt_neox: both sub-layers at once": Fault(
        "gpt_neox", "sequential", {"layers.*.residual": "parallel"}
    ),
    "gpt_neox: whole heads rotate": Fault("gpt_neox", "plain", {f"{ROTARY}.d_rotary": 10}),
    "gpt_neox: GELU by tanh": Fault(
        "gpt_neox", "plain", {"layers.*.feedforward.activation": "gelu_tanh"}, at_least=1e-5
    ),
    "gpt2: a square matrix is not turned": Fault("gpt2", "plain", layout=square_not_turned),
    "gpt2: sinusoidal positions": Fault("gpt2", "plain", {"position_table": "sinusoidal"}),
    "falcon: all q, then k and v": Fault("falcon", "groups, two norms", layout=as_rows),
    "falcon: norms exchanged": Fault("falcon", "groups, two norms", layout=norms_swapped),
    "falcon: one norm for both": Fault(
        "falcon",
        "groups, two norms",
        {"layers.*.residual": "parallel_shared_norm"},
    ),
    "falcon: one sub-layer after the other": Fault(
        "falcon",
        "one kv head, one norm",
        {"layers.*.residual": "sequential"},
        renames={"+.norm1": ".norm2"},
    ),
    "mixtral: probabilities of all experts": Fault(
        "mixtral", "plain", {f"{ROUTER}.normalise": False}
    ),
    "mixtral: one expert fewer": Fault("mixtral", "plain", {"layers.*.feedforward.top_k": 1}),
    "mixtral: no window": Fault("mixtral", "window", {WINDOWS: None}),
    "qwen3-moe: experts weigh 1 together": Fault(
        "qwen3-moe", "plain", {f"{ROUTER}.normalise": True}
    ),
    "qwen3-moe: probabilities of all experts": Fault(
        "qwen3-moe", "as published", {f"{ROUTER}.normalise": False}
    ),
    "olmoe: experts weigh 1 together": Fault("olmoe", "plain", {f"{ROUTER}.normalise": True}),
    "olmoe: interleaved": Fault("olmoe", "plain", {f"{ROTARY}.layout": "interleaved"}),
    "gpt-oss: no sinks": Fault("gpt-oss", "plain", {"layers.*.attention.sinks": False}),
    "gpt-oss: gates are not bounded": Fault("gpt-oss", "plain", {f"{EXPERT}.limit": None}),
    "gpt-oss: gates by SiLU": Fault("gpt-oss", "plain", {f"{EXPERT}.activation": "silu"}),
    "gpt-oss: nothing added to up": Fault("gpt-oss", "plain", {f"{EXPERT}.up_offset": 0.0}),
    "gpt-oss: gate and up exchanged": Fault("gpt-oss", "plain", layout=columns_swapped),
    "gpt-oss: probabilities of all experts": Fault(
        "gpt-oss", "plain", {f"{ROUTER}.normalise": False}
    ),
    "gpt-oss: no bias of the router": Fault("gpt-oss", "plain", {f"{ROUTER}.bias": False}),
    "gpt-oss: windows in the other layers": Fault("gpt-oss", "plain", {WINDOWS: [None, 7, None]}),
    "gpt-oss: bounds of yarn are rounded": Fault(
        "gpt-oss", "bounds within", {f"{ROTARY}.scaling.truncate": True}
    ),
    "deepseek-v3: half-split": Fault("deepseek-v3", "plain", {f"{ROTARY}.layout": "half_split"}),
    "deepseek-v3: interleaved": Fault("deepseek-v3", "halves", {f"{ROTARY}.layout": "interleaved"}),
    "deepseek-v3: scores by the head's width": Fault(
        "deepseek-v3", "scaled softmax", {"layers.*.attention.scale": None}
    ),
    "deepseek-v3: softmax": Fault("deepseek-v3", "plain", {f"{ROUTER}.score": "softmax"}),
    "deepseek-v3: choosing by the scores alone": Fault(
        "deepseek-v3", "plain", {f"{ROUTER}.selection_bias": False}
    ),
    "deepseek-v3: choosing from all groups": Fault(
        "deepseek-v3", "plain", {f"{ROUTER}.top_groups": 4}
    ),
    "deepseek-v3: experts count by their scores": Fault(
        "deepseek-v3", "plain", {f"{ROUTER}.normalise": False}
    ),
    "deepseek-v3: experts are not scaled": Fault("deepseek-v3", "plain", {f"{ROUTER}.scale": 1.0}),
    "deepseek-v3: no shared experts": Fault(
        "deepseek-v3", "halves", {"layers.*.feedforward.shared": None}
    ),
    "deepseek-v3: epsilon of the layers in the latent vectors": Fault(
        "deepseek-v3", "plain", {"layers.*.attention.latent.norm.eps": 1e-1}
    ),
}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", FAULTS)
def test_a_convention_that_is_wrong_is_noticed(tmp_path, name):
    fault = FAULTS[name]
    ids = models.tokens(2, LENGTH)
    with in_float64(fault.family):
        peer = build_peer(fault.family, fault.variant)
        expected = whole_pass(peer, ids)
    checkpoint = read_huggingface(save_peer(peer, tmp_path))
    tensors = checkpoint.tensors
    if fault.layout is not None:
        found, _ = read_sharded(tmp_path, allow_missing=False)
        layouts = FAMILY[fault.family].huggingface.all_layouts()
        changed = tuple(map(fault.layout, layouts))
        assert changed != layouts
        tensors = read_tensors(checkpoint.config, changed, found, "faulty")
    config = with_entries(checkpoint.config, fault.entries)
    tensors = renamed(tensors, fault.renames)
    wanted = {name: tensors[name] for name in parameter_shapes(config)}
    faulty = build_filled(config, wanted, dtype=torch.float64)
    assert float((faulty(ids) - expected).detach().abs().max()) > fault.at_least


def with_entries(config: DecoderConfig, entries: Mapping[str, Any]) -> DecoderConfig:
    decoder = config.model_dump(mode="json")
    for path, value in entries.items():
        put(decoder, (path,), value)
    changed = DecoderConfig.from_dict(decoder)
    assert not entries or changed != config
    return changed


def renamed(tensors: Tensors, renames: Mapping[str, str]) -> Tensors:
    """Names exchanged, or where the first begins with + the tensor also under the second."""
    result = dict(tensors)
    for old, new in renames.items():
        copied = old.removeprefix("+")
        for name in list(tensors):
            if copied in name:
                other = name.replace(copied, new)
                result[other] = tensors[name].renamed(other)
                if other in tensors and old == copied:
                    result[name] = tensors[other].renamed(name)
    return result
