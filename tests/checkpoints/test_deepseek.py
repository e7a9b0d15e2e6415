"""DeepSeek-V3's scaled softmax, its later layers, and layouts of experts that no shape tells."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from armillary.checkpoints.families.deepseek import DEEPSEEK_V3
from armillary.checkpoints.families.gpt_oss import GPT_OSS
from armillary.checkpoints.huggingface import read_huggingface, write_huggingface
from armillary.checkpoints.parameters import parameter_shapes
from armillary.checkpoints.safetensors import read_sharded, write_safetensors
from armillary.checkpoints.tensors import TensorToWrite
from armillary.config import DecoderConfig
from armillary.errors import CheckpointError
from armillary.rope_scaling import YaRN
from support.models import config, layer, mixture

FACTOR = 4.0


def g(weight: float) -> float:
    return 0.1 * weight * math.log(FACTOR) + 1


def numbers_of(model: DecoderConfig) -> dict[str, np.ndarray]:
    """Every element of every parameter another number."""
    found, start = {}, 1
    for name, shape in parameter_shapes(model).items():
        count = math.prod(shape)
        found[name] = np.arange(start, start + count, dtype=np.float32).reshape(shape)
        start += count
    return found


def to_write(name: str, values: np.ndarray) -> TensorToWrite:
    return TensorToWrite(name, "F32", values.shape, [np.ascontiguousarray(values).view(np.uint8)])


def deepseek(**rotary: Any) -> DecoderConfig:
    experts = mixture(
        router={"score": "sigmoid", "selection_bias": True, "n_groups": 3, "top_groups": 2},
        shared={"d_ff": 14},
    )
    latent = {"kv_rank": 12, "q_rank": 14, "d_rope": 4, "d_value": 8}
    made = config(
        layer(
            attention={"n_kv_heads": 6},
            rotary={"d_rotary": 4, "layout": "interleaved", **rotary},
            feedforward=experts,
        )
    ).to_dict()
    made["layers"][0]["attention"]["latent"] = latent
    made["layers"][0]["norm"]["eps"] = made["final_norm"]["eps"] = 1e-6
    return DecoderConfig.from_dict(made)


def saved(directory: Path, model: DecoderConfig, family: Any) -> Path:
    tensors = [to_write(name, values) for name, values in numbers_of(model).items()]
    write_huggingface(directory, model, tensors, family=family)
    return directory


@pytest.mark.parametrize(
    ("mscale", "all_dim", "of_cos", "of_softmax"),
    [
        (None, None, g(1), 1.0),
        (1.0, 1.0, 1.0, g(1) ** 2),
        (0.707, 0.707, 1.0, g(0.707) ** 2),
        (1.0, 0.0, g(1), 1.0),
    ],
)
def test_mscale_is_split_between_rotation_and_softmax(
    tmp_path, mscale, all_dim, of_cos, of_softmax
):
    """cases.md 37: factors on cos and sin, and on the scores, for each of the four."""
    rule = YaRN(factor=FACTOR, original_window=16)
    directory = saved(tmp_path / "a", deepseek(scaling=rule), DEEPSEEK_V3)
    entries = json.loads((directory / "config.json").read_text())
    for name in ("rope_scaling", "rope_parameters"):
        entries[name] |= {
            key: value
            for key, value in {"mscale": mscale, "mscale_all_dim": all_dim}.items()
            if value is not None
        }
    (directory / "config.json").write_text(json.dumps(entries))
    attention = read_huggingface(directory).config.layers[0].attention
    assert attention.rotary is not None
    assert attention.rotary.scaling.attention_factor() == pytest.approx(of_cos)
    assert attention.score_scale == pytest.approx(of_softmax * 10**-0.5)


def test_layers_after_the_last_are_passed_over(tmp_path):
    """They predict more than one token ahead, and the released files have one."""
    directory = saved(tmp_path / "a", deepseek(), DEEPSEEK_V3)
    found, _ = read_sharded(directory, False)
    more = [to_write(name, tensor.to_float32()) for name, tensor in found.items()]
    more.append(to_write("model.layers.1.eh_proj.weight", np.zeros((3, 5), np.float32)))
    write_safetensors(directory / "model.safetensors", more)
    model = deepseek()
    read = read_huggingface(directory)
    assert read.config == model
    assert set(read.tensors) == set(parameter_shapes(model))


def gpt_oss(d_ff: int) -> DecoderConfig:
    expert = {"d_ff": d_ff, "activation": "quick_gelu", "limit": 7.0, "up_offset": 1.0}
    experts = mixture(expert=expert | {"bias": True}, router={"bias": True})
    biases = {"qkv_bias": True, "out_bias": True, "sinks": True}
    made = config(layer(attention=biases, feedforward=experts)).to_dict() | {"d_model": 8}
    for norm in (made["layers"][0]["norm"], made["final_norm"]):
        norm["cast_before_weight"] = False
    return DecoderConfig.from_dict(made)


@pytest.mark.parametrize("d_ff", [4, 8])
def test_expert_matrices_go_by_the_table_where_no_shape_tells(tmp_path, d_ff):
    """cases.md 82: hidden 8, inner 4 and 8; twice 4 is 8, and 8 by 8 is square."""
    model = gpt_oss(d_ff)
    directory = saved(tmp_path / "a", model, GPT_OSS)
    found, _ = read_sharded(directory, False)
    ours = numbers_of(model)
    experts = "layers.0.feedforward.experts."
    both = found["model.layers.0.mlp.experts.gate_up_proj"].to_float32()
    assert both.shape == (6, 8, 2 * d_ff)
    for expert, row, column in ((0, 0, 1), (5, 7, d_ff - 1)):
        assert both[expert, row, 2 * column] == ours[f"{experts}gate.weight"][expert, column, row]
        assert both[expert, row, 2 * column + 1] == ours[f"{experts}up.weight"][expert, column, row]
    down = found["model.layers.0.mlp.experts.down_proj"].to_float32()
    np.testing.assert_array_equal(down, ours[f"{experts}down.weight"].transpose(0, 2, 1))
    read = read_huggingface(directory)
    assert read.config == model
    for name, values in ours.items():
        np.testing.assert_array_equal(read.tensors[name].to_float32(), values, err_msg=name)


def test_an_expert_that_is_not_there_is_named(tmp_path):
    """cases.md 74: nothing is filled with what happens to be there."""
    directory = saved(tmp_path / "a", deepseek(), DEEPSEEK_V3)
    found, _ = read_sharded(directory, False)
    kept = [
        to_write(name, tensor.to_float32())
        for name, tensor in found.items()
        if ".experts.4.up_proj" not in name
    ]
    write_safetensors(directory / "model.safetensors", kept)
    with pytest.raises(CheckpointError, match=r"missing .*mlp\.experts\.4\.up_proj\.weight"):
        read_huggingface(directory)
