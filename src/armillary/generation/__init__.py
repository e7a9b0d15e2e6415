"""Text from a decoder: sampling, streaming, batches. Knows tokenizers and engines, no files."""
