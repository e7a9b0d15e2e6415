"""Small vocabularies as GGUF metadata."""

from typing import Any

from armillary.tokenizer.encoder import byte_alphabet

CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n'"
    " + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


def byte_level(**changes: Any) -> dict[str, Any]:
    """Return a byte-level vocabulary with a few merges, role markers and one plain added token.

    `changes` set keys under `tokenizer.ggml.`; None takes a key away.
    """
    controls = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    merged = ["he", "ll", "hell", "hello", "Ġw", "Ġhello", "12", "'s", "ĠĠ", "<|", "|>", "im"]
    merges = ["h e", "l l", "he ll", "hell o", "Ġ w", "Ġ hello", "1 2", "' s", "Ġ Ġ"]
    merges += ["< |", "| >", "i m"]
    tokens = [*controls, *sorted(byte_alphabet()), *merged, "<think>"]
    types = [CONTROL] * 3 + [NORMAL] * (len(tokens) - 4) + [USER_DEFINED]
    ggml = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": types,
        "merges": merges,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "padding_token_id": 0,
    }
    return _metadata(ggml | changes)


def sentencepiece(**changes: Any) -> dict[str, Any]:
    """Return a SentencePiece vocabulary with byte tokens, in which merges could spell `</s>`."""
    pieces = ["▁a", "▁b", "ab", "▁ab", "▁▁", "</", "s>", "<s", "<0", "x0", "A>", "<0x0", "a", "b"]
    pieces += ["▁", "<", "/", "s", ">", "0", "x", "A", "é"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{n:02X}>" for n in range(256)), *pieces]
    types = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * len(pieces)
    scores = [0.0] * 259 + [-float(n) for n in range(len(pieces))]
    ggml = {
        "model": "llama",
        "tokens": tokens,
        "token_type": types,
        "scores": scores,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    return _metadata(ggml | changes)


def _metadata(ggml: dict[str, Any]) -> dict[str, Any]:
    return {f"tokenizer.ggml.{key}": value for key, value in ggml.items() if value is not None}
