"""Text from a decoder: sampling, streaming, batches. Knows decoder and tokenizer, no files."""
