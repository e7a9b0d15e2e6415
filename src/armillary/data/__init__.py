"""Text → tokens → packed batches; the same every time, and to be gone on with after any end.

`prepare` makes a directory of token shards out of sources, `TokenDataset` opens one, and
`PackedBatches` puts its documents into batches of NumPy arrays. Nothing here imports torch.
"""
