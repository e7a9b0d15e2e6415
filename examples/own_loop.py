"""A training loop of one's own on armillary.training, as docs/training.md explains it."""

import torch

from armillary import Decoder, DecoderConfig
from armillary.training.loss import next_token_labels, next_token_loss
from armillary.training.optimizer import OptimizerConfig, build_optimizer
from armillary.training.precision import Precision
from armillary.training.schedule import ScheduleConfig, set_learning_rates

torch.manual_seed(1)
squares = " ".join(f"{n} times {n} is {n * n}." for n in range(1000))
text = torch.tensor(list(squares.encode()))
config = DecoderConfig.uniform(
    vocab_size=256, d_model=48, n_layers=2, n_heads=4, n_kv_heads=2, max_positions=64
)
decoder = Decoder(config).train()
optimizer = build_optimizer(decoder, OptimizerConfig(kind="muon", lr=5e-3))
schedule = ScheduleConfig(steps=40, kind="wsd", warmup=4, decay=15, shape="sqrt")
precision = Precision("float32")  # or "bfloat16", where the machine is faster at it

for step in range(schedule.steps):
    starts = torch.randint(0, len(text) - 64, (2, 8, 1))
    batches = text[starts + torch.arange(64)]  # two micro-batches, (2, 8, 64)
    labels = [next_token_labels(tokens) for tokens in batches]
    count = sum(int((targets >= 0).sum()) for targets in labels)  # of the whole step
    set_learning_rates(optimizer, schedule, step)
    nats = 0.0
    for tokens, targets in zip(batches, labels, strict=True):
        with precision.autocast():
            loss = next_token_loss(decoder, decoder.hidden(tokens), targets)
        precision.backward(loss.total / count)
        nats += float(loss.cross_entropy) / count
    norm = precision.step(optimizer, max_norm=1.0)  # skipped unless norm.is_finite
    if step % 13 == 0:
        print(f"step {step:2}  {nats:.1f} nats a byte")
