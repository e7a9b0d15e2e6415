"""Training on many processes: torch.distributed as the engine, started by torchrun.

    config.py     how many processes of each kind, and the sizes that must divide
    ranks.py      where this process stands, and the few sums that a loop needs
    sharding.py   `parallelise`: tensor plan, checkpointing, compilation and FSDP2 in their order
    tensor.py     which weights are split by heads and channels, and what is then summed
    vocabulary.py  the rows of embedding and head shared out by ids
    context.py    sequences in parts: keys and values gathered, queries in balanced halves
    export.py     every rank writes its share of the tensors, none holds them all

Only `config.py` knows no torch.
"""
