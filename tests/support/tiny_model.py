"""A language model of a few thousand weights with a byte-level tokenizer and a chat template."""

import json
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from armillary.config import DecoderConfig
from armillary.language_model import LanguageModel
from armillary.rope_scaling import AnyRopeScaling
from armillary.tokenizer import Tokenizer as OurTokenizer
from support.models import build

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def tiny_tokenizer(directory: Path) -> OurTokenizer:
    """Every byte is a token of its own, after three control tokens; the last one ends a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {char: number + len(SPECIALS) for number, char in enumerate(alphabet)}
    vocabulary |= {text: number for number, text in enumerate(SPECIALS)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIALS])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "bos_token": "<|im_start|>", "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return OurTokenizer.from_file(directory / "tokenizer.json")


def tiny_model(
    directory: Path, *, max_positions: int = 256, scaling: AnyRopeScaling | None = None
) -> LanguageModel:
    """Random weights, large enough that greedy texts differ from prompt to prompt."""
    tokenizer = tiny_tokenizer(directory)
    config = DecoderConfig.uniform(
        vocab_size=tokenizer.vocab_size,
        d_model=40,
        n_layers=2,
        n_heads=6,
        n_kv_heads=2,
        d_head=10,
        d_ff=24,
        max_positions=max_positions,
        rope_base=100.0,
        rope_scaling=scaling,
    )
    decoder = build(config, dtype=torch.float32, std=0.2)
    return LanguageModel(decoder, tokenizer, {}, tokenizer.eos_ids)
