"""Our decoder as a scorer."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from armillary.decoder import Decoder
from armillary.evaluation.scoring import Continuation, Scored


class DecoderScorer:
    """Scores with a decoder."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder.eval()

    @property
    def window(self) -> int:
        """The decoder's positions."""
        return self.decoder.config.max_positions

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.decoder.config.vocab_size

    def begin(self) -> None:
        """Nothing is kept yet."""

    @torch.no_grad()
    def score(self, context: Sequence[int], continuations: Sequence[Continuation]) -> list[Scored]:
        """See `Scorer`."""
        longest = max(len(each.tokens) for each in continuations)
        if not context:
            raise ValueError("a context needs a token at least; give BOS")
        if len(context) + longest > self.window:
            raise ValueError(
                f"{len(context)} tokens of context and {longest} of continuation are more than "
                f"the window of {self.window}"
            )
        return [self._score(context, each) for each in continuations]

    def _score(self, context: Sequence[int], continuation: Continuation) -> Scored:
        ids = torch.tensor([[*context, *continuation.tokens]])
        hidden = self.decoder.hidden(ids)[0, -continuation.scored - 1 : -1]
        return scored(self.decoder.project(hidden), continuation.tokens[-continuation.scored :])


def scored(logits: Tensor, targets: Sequence[int]) -> Scored:
    """logits (T, V) and the tokens that came (T) → what the model made of them."""
    logits = logits.float() if logits.dtype != torch.float64 else logits
    chosen = torch.tensor(list(targets), device=logits.device).unsqueeze(-1)
    logprobs = logits.log_softmax(-1).gather(-1, chosen).squeeze(-1)
    likeliest = logits.argmax(-1) == chosen.squeeze(-1)
    return Scored(np.asarray(logprobs.double().cpu().numpy()), np.asarray(likeliest.cpu().numpy()))
