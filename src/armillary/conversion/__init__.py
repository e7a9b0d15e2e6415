"""A checkpoint in another format, with a proof: streamed, resumable, read back and compared."""
