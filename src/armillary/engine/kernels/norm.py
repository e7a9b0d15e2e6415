"""Normalisation of rows, and of heads within rows."""

import numpy as np

from armillary.engine.kernel import Address, Kernel, Live, Number, Size, kernel
from armillary.engine.kernels.common import floats, share_rows


def rms_norm() -> Kernel:
    """Rows over their root mean square, times a weight. Source: Zhang and Sennrich 2019, §4."""

    def rms_norm(
        thread: int,
        threads: int,
        x: Address,
        x_stride: Size,
        parts: Size,
        d: Size,
        weight: Address,
        eps: Number,
        out: Address,
        out_stride: Size,
        private: Size,
        rows: Live,
    ) -> None:
        # A row is `parts` vectors of width d, each normalised alone (heads), with one weight.
        first, last = share_rows(rows, private, thread, threads)
        w = floats(weight)
        for row in range(first, last):
            for part in range(parts):
                a = floats(x + row * x_stride + 4 * d * part)
                b = floats(out + thread * private + row * out_stride + 4 * d * part)
                squares = np.float32(0)
                for i in range(d):
                    squares += a[i] * a[i]
                scale = np.float32(1) / np.sqrt(squares / np.float32(d) + eps)
                for i in range(d):
                    b[i] = a[i] * scale * w[i]

    return kernel(rms_norm)


def layer_norm() -> Kernel:
    """Rows less their mean, over their standard deviation, times a weight, perhaps plus a bias.

    Source: Ba et al. 2016, §3.
    """

    def layer_norm(
        thread: int,
        threads: int,
        x: Address,
        x_stride: Size,
        parts: Size,
        d: Size,
        weight: Address,
        bias: Address,
        eps: Number,
        out: Address,
        out_stride: Size,
        private: Size,
        rows: Live,
    ) -> None:
        first, last = share_rows(rows, private, thread, threads)
        w, c = floats(weight), floats(bias)
        for row in range(first, last):
            for part in range(parts):
                a = floats(x + row * x_stride + 4 * d * part)
                b = floats(out + thread * private + row * out_stride + 4 * d * part)
                total = np.float32(0)
                for i in range(d):
                    total += a[i]
                mean = total / np.float32(d)
                squares = np.float32(0)
                for i in range(d):
                    squares += (a[i] - mean) * (a[i] - mean)
                scale = np.float32(1) / np.sqrt(squares / np.float32(d) + eps)
                for i in range(d):
                    b[i] = (a[i] - mean) * scale * w[i]
                if bias:
                    for i in range(d):
                        b[i] += c[i]

    return kernel(layer_norm)
