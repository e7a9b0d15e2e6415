"""Faults of conversions, planted in the files of a model: what a doctor must find.

Each takes a sound checkpoint and a folder, and writes one that has the fault, in the format that
the fault is known from. The doctor is told nothing of them.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from armillary.checkpoints import Checkpoint, save_armillary, write_huggingface
from armillary.checkpoints.gguf_write import write_gguf
from armillary.checkpoints.safetensors import read_safetensors, write_safetensors
from armillary.checkpoints.tensors import StoredTensor, TensorToWrite, encode, to_write
from armillary.config import DecoderConfig
from armillary.rope_layout import half_split_from_interleaved, interleaved_from_half_split
from armillary.rope_scaling import base_frequencies
from armillary.tokenizer import Tokenizer

Plant = Callable[[Checkpoint, Path], Path]


@dataclass(frozen=True)
class Fault:
    """`code` is what the first finding must be of, `words` what its line must say."""

    name: str
    code: str
    words: tuple[str, ...]
    plant: Plant


# Writing.


def as_huggingface(checkpoint: Checkpoint, folder: Path, encoding: str = "BF16") -> Path:
    """A directory of Hugging Face's."""
    tensors = [to_write(tensor, encoding) for tensor in checkpoint.tensors.values()]
    target = folder / "huggingface"
    write_huggingface(
        target, checkpoint.config, tensors, checkpoint.tokenizer, checkpoint.generation
    )
    return target


def as_gguf(checkpoint: Checkpoint, folder: Path) -> Path:
    """A GGUF file, every tensor in the encoding that it has."""
    target = folder / "model.gguf"
    encodings = {name: tensor.encoding for name, tensor in checkpoint.tensors.items()}
    write_gguf(target, checkpoint, encodings)
    return target


def as_ours(checkpoint: Checkpoint, folder: Path) -> Path:
    """A directory of our own."""
    tensors = [to_write(tensor, tensor.encoding) for tensor in checkpoint.tensors.values()]
    target = folder / "ours"
    generation = dict(checkpoint.generation)
    if "eos_token_id" in generation:
        generation["eos_token_id"] = list(generation["eos_token_id"])
    save_armillary(target, checkpoint.config, tensors, checkpoint.tokenizer, generation)
    return target


def changed_json(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Edit a JSON file in place."""
    entries = json.loads(path.read_text("utf-8"))
    change(entries)
    path.write_text(json.dumps(entries), "utf-8")


# Changing.


def stored(name: str, numbers: np.ndarray, encoding: str = "F32") -> StoredTensor:
    """A tensor that is in no file yet."""
    data = encode(np.ascontiguousarray(numbers, np.float32), encoding).reshape(-1)
    return StoredTensor(name, numbers.shape, encoding, data.view(np.uint8), "memory")


def with_tensors(checkpoint: Checkpoint, changed: Mapping[str, StoredTensor]) -> Checkpoint:
    """The same with some tensors replaced."""
    renamed = {name: tensor.renamed(name) for name, tensor in changed.items()}
    return replace(checkpoint, tensors={**checkpoint.tensors, **renamed})


def with_attention(config: DecoderConfig, **update: Any) -> DecoderConfig:
    """Every layer's attention changed alike."""
    layers = [
        layer.model_copy(update={"attention": layer.attention.model_copy(update=update)})
        for layer in config.layers
    ]
    return config.model_copy(update={"layers": tuple(layers)})


def with_rotary(config: DecoderConfig, **update: Any) -> DecoderConfig:
    """Every layer's rotation changed alike."""
    rotary = config.layers[0].attention.rotary
    return with_attention(config, rotary=rotary.model_copy(update=update))


def with_norms(config: DecoderConfig, **update: Any) -> DecoderConfig:
    """All norms changed alike."""
    norm = config.layers[0].norm.model_copy(update=update)
    layers = [layer.model_copy(update={"norm": norm}) for layer in config.layers]
    return config.model_copy(update={"layers": tuple(layers), "final_norm": norm})


def exchanged(checkpoint: Checkpoint, one: str, other: str, layers: Any) -> Checkpoint:
    """Two tensors of some layers under each other's names."""
    changed = {}
    for number in layers:
        a, b = (f"layers.{number}.{name}.weight" for name in (one, other))
        changed |= {a: checkpoint.tensors[b], b: checkpoint.tensors[a]}
    return with_tensors(checkpoint, changed)


def exchanged_layers(checkpoint: Checkpoint, one: int, other: int) -> Checkpoint:
    """All tensors of two layers under each other's names."""
    changed = {}
    for a, b in ((one, other), (other, one)):
        for name, tensor in checkpoint.tensors.items():
            if name.startswith(f"layers.{a}."):
                changed[name.replace(f"layers.{a}.", f"layers.{b}.")] = tensor
    return with_tensors(checkpoint, changed)


def transposed(checkpoint: Checkpoint, name: str) -> Checkpoint:
    """A square matrix the other way round."""
    numbers = checkpoint.tensors[name].to_float32().T
    return with_tensors(checkpoint, {name: stored(name, numbers)})


def reordered(checkpoint: Checkpoint, order: Callable[..., Any]) -> Checkpoint:
    """The rows of all Q and K in another order."""
    changed = {}
    for number, layer in enumerate(checkpoint.config.layers):
        attention = layer.attention
        for part, count in (("q", attention.n_heads), ("k", attention.n_kv_heads)):
            name = f"layers.{number}.attention.{part}.weight"
            rows = order(count, attention.d_head, attention.rotary.d_rotary)
            changed[name] = checkpoint.tensors[name].reordered(rows)
    return with_tensors(checkpoint, changed)


# The faults.


def unpermuted_gguf(checkpoint: Checkpoint, folder: Path) -> Path:
    """Rows as Hugging Face has them in a file whose readers expect them interleaved."""
    return as_gguf(reordered(checkpoint, half_split_from_interleaved), folder)


def unpermuted_huggingface(checkpoint: Checkpoint, folder: Path) -> Path:
    """Rows as Meta has them in a directory whose readers expect halves."""
    return as_huggingface(reordered(checkpoint, interleaved_from_half_split), folder)


def wrong_base(checkpoint: Checkpoint, folder: Path) -> Path:
    """A converter's default base."""
    config = with_rotary(checkpoint.config, base=10_000.0)
    return as_huggingface(replace(checkpoint, config=config), folder)


def dropped_scaling(checkpoint: Checkpoint, folder: Path, factor: int = 4) -> Path:
    """A window that a rule had made longer, without the rule."""
    window = factor * checkpoint.config.max_positions
    config = checkpoint.config.model_copy(update={"max_positions": window})
    return as_huggingface(replace(checkpoint, config=config), folder)


def large_epsilon(checkpoint: Checkpoint, folder: Path) -> Path:
    """An epsilon a thousand times too large."""
    config = with_norms(checkpoint.config, eps=1e-2)
    return as_gguf(replace(checkpoint, config=config), folder)


def swapped_gate_and_up(checkpoint: Checkpoint, folder: Path) -> Path:
    """The two halves of the gated unit under each other's names, in every layer."""
    layers = range(checkpoint.config.n_layers)
    return as_gguf(exchanged(checkpoint, "feedforward.gate", "feedforward.up", layers), folder)


def head_of_zeros(checkpoint: Checkpoint, folder: Path) -> Path:
    """A head of its own that was never filled."""
    config = checkpoint.config.model_copy(update={"tie_head": False})
    shape = (config.vocab_size, config.d_model)
    head = stored("head.weight", np.zeros(shape, np.float32), "F16")
    return as_huggingface(
        with_tensors(replace(checkpoint, config=config), {"head.weight": head}), folder
    )


def other_tokenizer(tokenizer: Tokenizer) -> Plant:
    """Another model's vocabulary beside the weights."""

    def plant(checkpoint: Checkpoint, folder: Path) -> Path:
        return as_huggingface(replace(checkpoint, tokenizer=tokenizer), folder)

    return plant


def swapped_in_layer(one: str, other: str, layer: int, write: Plant = as_gguf) -> Plant:
    """Two tensors of one layer under each other's names."""
    return lambda checkpoint, folder: write(exchanged(checkpoint, one, other, [layer]), folder)


def swapped_layers(one: int, other: int, write: Plant = as_gguf) -> Plant:
    """Two layers under each other's numbers."""
    return lambda checkpoint, folder: write(exchanged_layers(checkpoint, one, other), folder)


def transposed_matrix(name: str, write: Plant = as_huggingface) -> Plant:
    """A square matrix the other way round: its shape does not tell."""
    return lambda checkpoint, folder: write(transposed(checkpoint, name), folder)


def one_nan(name: str) -> Plant:
    """A single number that is none."""

    def plant(checkpoint: Checkpoint, folder: Path) -> Path:
        numbers = checkpoint.tensors[name].to_float32()
        numbers.reshape(-1)[numbers.size // 3] = np.nan
        return as_huggingface(with_tensors(checkpoint, {name: stored(name, numbers)}), folder)

    return plant


def one_added_twice(checkpoint: Checkpoint, folder: Path) -> Path:
    """1 added to the weights of norms that have it already."""
    changed = {
        name: stored(name, tensor.to_float32() + 1)
        for name, tensor in checkpoint.tensors.items()
        if "norm" in name
    }
    return as_gguf(with_tensors(checkpoint, changed), folder)


def narrow_frequencies(checkpoint: Checkpoint, folder: Path) -> Path:
    """Tables of frequencies that were cast to bfloat16 with the model and saved with it."""
    target = as_huggingface(checkpoint, folder)
    path = target / "model.safetensors"
    tensors = [to_write(tensor, tensor.encoding) for tensor in read_safetensors(path).values()]
    for number, layer in enumerate(checkpoint.config.layers):
        rotary = layer.attention.rotary
        theta = base_frequencies(rotary.base, rotary.d_rotary).astype(np.float32)
        name = f"model.layers.{number}.self_attn.rotary_emb.inv_freq"
        tensors.append(TensorToWrite(name, "BF16", theta.shape, [encode(theta, "BF16")]))
    write_safetensors(path.with_suffix(".new"), tensors)
    path.with_suffix(".new").rename(path)
    return target


def narrow_divisors(checkpoint: Checkpoint, folder: Path) -> Path:
    """Divisors of frequencies that were rounded to bfloat16, in a GGUF file as float32."""
    from armillary.rope_scaling import LongRoPE

    rotary = checkpoint.config.layers[0].attention.rotary
    exact = base_frequencies(10_000.0, rotary.d_rotary) / base_frequencies(
        rotary.base, rotary.d_rotary
    )
    rounded = stored("", exact.astype(np.float32), "BF16").to_float32()
    listed = tuple(float(x) for x in rounded)
    rule = LongRoPE(
        short_factor=listed,
        long_factor=listed,
        factor=1.0,
        original_window=checkpoint.config.max_positions,
    )
    config = with_rotary(checkpoint.config, base=10_000.0, scaling=rule)
    return as_gguf(replace(checkpoint, config=config), folder)


def wrong_head_count(checkpoint: Checkpoint, folder: Path, write: Plant = as_huggingface) -> Path:
    """Twice as many heads of half the width: no shape changes, and rows stay where they are."""
    attention = checkpoint.config.layers[0].attention
    width = attention.d_head // 2
    config = with_attention(
        checkpoint.config,
        n_heads=2 * attention.n_heads,
        n_kv_heads=2 * attention.n_kv_heads,
        d_head=width,
        rotary=attention.rotary.model_copy(update={"d_rotary": width}),
    )
    if write is as_gguf:
        # Its writer brings rows to the file's order by the head counts; these were right then.
        checkpoint = reordered(checkpoint, interleaved_from_half_split)
        checkpoint = reordered(replace(checkpoint, config=config), half_split_from_interleaved)
    return write(replace(checkpoint, config=config), folder)


def missing_bos(checkpoint: Checkpoint, folder: Path) -> Path:
    """A tokenizer that names no beginning, beside a configuration that does."""
    target = as_huggingface(checkpoint, folder)
    changed_json(target / "tokenizer_config.json", lambda entries: entries.pop("bos_token"))
    return target


def truncated(write: Plant = as_gguf, share: float = 0.6) -> Plant:
    """A file of which the end did not arrive."""

    def plant(checkpoint: Checkpoint, folder: Path) -> Path:
        target = write(checkpoint, folder)
        file = target if target.is_file() else target / "model.safetensors"
        with file.open("r+b") as end:
            end.truncate(int(file.stat().st_size * share))
        return target

    return plant
