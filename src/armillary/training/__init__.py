"""Training runs, and the pieces of a loop, each of use alone in a loop of one's own.

    loss.py            next-token cross-entropy that never holds all logits, and labels for it
    objective.py       a decoder and its loss as one module
    optimizer.py       parameter groups, AdamW and Muon, clipping
    schedule.py        the learning rate as a function of the step
    precision.py       half-precision products over float32 weights, with a loss scaler for float16
    checkpointing.py   a layer's activations computed again instead of kept
    lora.py            low-rank adapters: train, merge, save
    checkpoint.py      a state on disk, whole or sharded, and back bit for bit
    parallel           a decoder spread over processes
    memory.py          what a run needs of each process's memory, from its settings alone

None of these reads data, writes a log or knows a command line. A whole run:

    run_config.py      its settings
    setup.py           settings → tokenizer, batches, a decoder with its weights
    loop.py            the steps, and what happens between them
    run.py             `train`, from settings to the end

What a run tells is apart:

    events.py          the facts that a run reports to its listeners
    log.py             a listener that writes them as JSON lines, and the way back
    tensorboard.py     a listener that draws curves for TensorBoard
    history.py         what the events of a run come to
    summary.py         a page about a run, from its log
"""
