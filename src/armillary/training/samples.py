"""Texts that a model writes while it trains, through the objective, so sharded ones write too."""

import torch

from armillary.generation.sampling import Logits, SamplingConfig, choose, generator
from armillary.generation.stream import TextStream
from armillary.tokenizer import Tokenizer
from armillary.training.objective import Objective
from armillary.training.parallel.ranks import Ranks


def continued(
    objective: Objective,
    tokenizer: Tokenizer,
    prompt: str,
    sampling: SamplingConfig,
    *,
    end_ids: tuple[int, ...],
    ranks: Ranks,
) -> str:
    """What the model makes of a prompt; every rank calls this and takes part in every token.

    Each token is computed with all before it: samples are short, and a cache would have to know
    how the model is sharded. The objective is left as it was; no random state moves.
    """
    training = objective.training
    objective.eval()
    tokens = tokenizer.encode(prompt)
    stream, draws = TextStream(tokenizer, prompt=tokens), generator(sampling.seed)
    text = ""
    try:
        for _ in range(sampling.max_tokens):
            chosen = choose(_last_logits(objective, tokens, ranks), sampling, draws.random())
            # Ranks on unlike machines may differ in the last bits; they must not in the token.
            chosen = int(ranks.sum_of_parts([float(chosen) if ranks.is_main else 0.0])[0])
            if chosen in end_ids:
                break
            tokens.append(chosen)
            text += stream.push(chosen)
        return text + stream.finish()
    finally:
        objective.train(training)


@torch.no_grad()
def _last_logits(objective: Objective, tokens: list[int], ranks: Ranks) -> Logits:
    logits: torch.Tensor = objective(torch.tensor([tokens], device=ranks.device))
    row: Logits = logits[0].float().cpu().numpy()
    return row
