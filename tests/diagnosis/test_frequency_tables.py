"""Tables of frequencies that were rounded are found wherever a file may carry one.

cases.md 2: with frequencies in bfloat16, the angle at position 4095 is off by 1.79 radians.
"""

import numpy as np
import pytest

from armillary.checkpoints import open_checkpoint
from armillary.checkpoints.tensors import encode
from armillary.config import DecoderConfig
from armillary.diagnosis import frequency_tables
from armillary.diagnosis.frequency_tables import Table, check_frequency_tables
from armillary.rope_scaling import Llama3, LongRoPE, base_frequencies
from support import faults


def config(scaling=None, base=1e4):
    return DecoderConfig.uniform(
        vocab_size=61,
        d_model=128,
        n_layers=1,
        n_heads=2,
        max_positions=4096,
        rope_base=base,
        rope_scaling=scaling,
    )


def rounded(numbers):
    narrow = encode(np.asarray(numbers, np.float32), "BF16").view("<u2")
    return (narrow.astype(np.uint32) << 16).view(np.float32)


def judged(monkeypatch, tmp_path, tables, scaling=None):
    monkeypatch.setattr(frequency_tables, "stored_tables", lambda *_: iter(tables))
    return check_frequency_tables(config(scaling), tmp_path, "huggingface")


@pytest.mark.parametrize("encoding", ["BF16", "F32"])
def test_a_rounded_table_is_found_also_when_it_was_widened_again(monkeypatch, tmp_path, encoding):
    table = Table("x.inv_freq", rounded(base_frequencies(1e4, 64)), encoding, divides=False)
    check, (finding,) = judged(monkeypatch, tmp_path, [table])
    assert check.holds is False
    assert finding.code == "frequency-table"
    assert "1.8 radians" in finding.evidence


def test_an_exact_table_passes(monkeypatch, tmp_path):
    exact = base_frequencies(1e4, 64).astype(np.float32)
    check, findings = judged(monkeypatch, tmp_path, [Table("inv_freq", exact, "F32", False)])
    assert check.holds
    assert findings == []


def test_divisors_of_llama3_pass_and_rounded_ones_do_not(monkeypatch, tmp_path):
    theta = base_frequencies(1e4, 64)
    rule = Llama3(factor=8.0, original_window=512)
    divisors = (theta / rule.frequencies(1e4, 64, 4096)).astype(np.float32)
    table = Table("rope_freqs.weight", divisors, "F32", divides=True)
    assert judged(monkeypatch, tmp_path, [table])[1] == []
    grown = (10.0 ** (np.arange(32) / 32)).astype(np.float32)
    table = Table("rope_freqs.weight", rounded(grown), "F32", divides=True)
    (finding,) = judged(monkeypatch, tmp_path, [table])[1]
    assert "bf16" in finding.fault


def test_lists_of_a_configuration_are_tables_too(monkeypatch, tmp_path):
    listed = tuple(float(x) for x in rounded(1.37 ** (np.arange(32) / 16)))
    rule = LongRoPE(short_factor=listed, long_factor=listed, factor=1.0, original_window=4096)
    assert judged(monkeypatch, tmp_path, [], rule)[1][0].code == "frequency-table"
    decimal = tuple(round(1 + i / 100, 2) for i in range(32))
    rule = LongRoPE(short_factor=decimal, long_factor=decimal, factor=1.0, original_window=4096)
    assert judged(monkeypatch, tmp_path, [], rule)[1] == []


def test_tables_that_the_reader_drops_are_looked_at(learned, tmp_path):
    """The frequencies that old files carry; none of them is used to compute."""
    wide = learned.config.model_copy(update={"max_positions": 4096})
    from dataclasses import replace

    target = faults.narrow_frequencies(replace(learned, config=wide), tmp_path)
    checkpoint = open_checkpoint(target)
    _, findings = check_frequency_tables(checkpoint.config, target, "huggingface")
    assert "layers.0" in findings[0].fault
