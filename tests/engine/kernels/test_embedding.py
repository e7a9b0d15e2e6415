"""Rows of a table, as the gguf library reads them."""

import numpy as np
import pytest

from support.kernels import call, count, drawn, library_for, machines, spaced
from support.quantised import PLAIN, QUANTISED, numbers, stored

CHOSEN = np.array([4, 0, 4, 60, 17], dtype=np.int64)


@pytest.mark.parametrize("machine", machines())
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("name", [*PLAIN, *QUANTISED])
def test_rows_are_the_tables(name: str, threads: int, machine: str) -> None:
    for k in (96,) if name in QUANTISED else (1, 40, 51):
        rows = stored(name, drawn(61, k))
        order = np.random.default_rng(2).permutation(61).astype(np.int64)
        for moved, scale in ((None, 1.0), (order, 1.0), (None, 6.25)):
            out = spaced(np.full((len(CHOSEN), k), np.nan, np.float32))
            call(
                f"embedding_{name}",
                code=library_for(machine),
                threads=threads,
                table=rows,
                row_bytes=rows.shape[1],
                order=moved,
                k=k,
                scale=scale,
                numbers=CHOSEN,
                out=out,
                out_stride=out.strides[0],
                rows=count(len(CHOSEN)),
            )
            places = CHOSEN if moved is None else moved[CHOSEN]
            expected = numbers(name, rows)[places].astype(np.float32) * np.float32(scale)
            # d·q + m may be rounded once or twice.
            np.testing.assert_allclose(out[:, :k], expected, rtol=2e-7, atol=2e-7 * scale)
            assert np.isnan(out[:, k:]).all()
