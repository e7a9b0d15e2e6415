"""Logits to the weights that a token is drawn by."""

import numpy as np

from armillary.engine.kernel import Address, Kernel, Number, Size, kernel
from armillary.engine.kernels.common import floats, share
from armillary.engine.kernels.elementary import exp

# e^x below it is no normal float32, and a 1e-38th of the likeliest is never drawn.
_NOTHING = np.float32(-87.0)


def weigh() -> Kernel:
    """w ← e^((x − greatest) / temperature), 0 for what is too small.

    Exact, since a logit may be −inf; what is left is done for each number alone.
    """

    def weigh(
        thread: int,
        threads: int,
        x: Address,
        n: Size,
        greatest: Number,
        temperature: Number,
        out: Address,
    ) -> None:
        first, last = share(n, thread, threads)
        logits, weights = floats(x), floats(out)
        for i in range(first, last):
            exponent = (logits[i] - greatest) / temperature
            weight = exp(max(exponent, _NOTHING))
            weights[i] = weight if exponent > _NOTHING else np.float32(0)

    return kernel(weigh, exact=True)
