"""Text ↔ token ids: byte-level and SentencePiece vocabularies out of tokenizer.json and of GGUF.

Knows nothing of models, and needs no torch.
"""

from armillary.tokenizer.tokenizer import Tokenizer

__all__ = ["Tokenizer"]
