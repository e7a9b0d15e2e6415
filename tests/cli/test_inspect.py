import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from armillary.checkpoints.checkpoint import Checkpoint
from armillary.checkpoints.tensors import StoredTensor
from armillary.cli import main
from armillary.config import (
    AttentionConfig,
    DecoderConfig,
    FeedForwardConfig,
    LayerConfig,
    RotaryConfig,
)
from armillary.rope_scaling import Llama3, YaRN
from support.downloads import smollm2_gguf

ONE_LAYER = str(Path(__file__).parents[2] / "examples" / "one-layer.yaml")


@pytest.fixture(autouse=True)
def no_terminal(monkeypatch):
    for name in ("COLUMNS", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def inspect(capsys):
    """Run the command and give its standard output."""

    def run(*arguments: object) -> str:
        code = main(["inspect", *map(str, arguments)])
        captured = capsys.readouterr()
        assert (code, captured.err) == (0, "")
        return captured.out

    return run


@pytest.fixture
def write(tmp_path):
    """Write a configuration to a file."""

    def to_file(config: DecoderConfig, name: str = "model.yaml") -> Path:
        path = tmp_path / name
        path.write_text(config.to_yaml() if path.suffix == ".yaml" else config.to_json())
        return path

    return to_file


def large() -> DecoderConfig:
    return DecoderConfig.uniform(
        vocab_size=128256,
        d_model=4096,
        n_layers=32,
        n_heads=32,
        n_kv_heads=8,
        d_ff=14336,
        max_positions=131072,
        rope_base=500000.0,
        rope_scaling=Llama3(factor=8.0, original_window=8192),
    )


def mixed() -> DecoderConfig:
    """Three kinds of layers: windowed and rotated in part by YaRN; without rotation; fully."""
    sizes = {"n_heads": 6, "n_kv_heads": 2, "d_head": 10}
    yarn = RotaryConfig(
        d_rotary=6,
        base=5e5,
        layout="interleaved",
        scaling=YaRN(factor=4.0, original_window=32),
    )
    feedforward = FeedForwardConfig(d_ff=24)
    local, none, full = (
        LayerConfig(attention=AttentionConfig(**sizes, **options), feedforward=feedforward)
        for options in ({"window": 16, "rotary": yarn}, {}, {"rotary": RotaryConfig(d_rotary=10)})
    )
    return DecoderConfig(
        vocab_size=61,
        d_model=40,
        max_positions=128,
        layers=(local, none, local, local, full),
        position_table="learned",
        tie_head=True,
    )


def rows(text: str) -> list[tuple[str, ...]]:
    """The cells of each line; two blanks part them."""
    return [tuple(re.split(r"\s{2,}", line.strip())) for line in text.splitlines()]


def test_one_layer_gives_the_table_of_the_specification(inspect):
    shown = rows(inspect(ONE_LAYER, "--batch", 2, "--length", 3))
    start = shown.index(("step", "weights", "output", "parameters"))
    assert [cells for cells in shown[start + 2 : start + 13] if cells != ("",)] == [
        ("norm 1", "(8,)", "(2, 3, 8)", "8"),
        ("q, k, v projections", "three (8, 8)", "three (2, 3, 8)", "192"),
        ("split heads, rotate q and k", "–", "three (2, 2, 3, 4)", "–"),
        ("causal attention", "–", "scores (2, 2, 3, 3), result (2, 2, 3, 4)", "–"),
        ("join heads, output projection, residual", "(8, 8)", "(2, 3, 8)", "64"),
        ("norm 2", "(8,)", "(2, 3, 8)", "8"),
        ("gate and up", "two (8, 16)", "two (2, 3, 16)", "256"),
        ("SiLU, product, down", "(16, 8)", "(2, 3, 8)", "128"),
        ("residual", "–", "(2, 3, 8)", "–"),
        ("sum of one layer", "656"),
    ]


def test_without_sizes_it_is_one_sequence_as_long_as_the_window(inspect):
    text = inspect(ONE_LAYER)
    assert ("sum of one layer", "656") in rows(text)
    assert ("norm 1", "(8,)", "(1, 32, 8)", "8") in rows(text)


def test_embedding_norm_and_head_are_counted_apart(inspect):
    shown = rows(inspect(ONE_LAYER, "--batch", 2, "--length", 3))
    for row in [
        ("embedding", "(16, 8)", "(2, 3, 8)", "128"),
        ("final norm", "(8,)", "(2, 3, 8)", "8"),
        ("head", "(8, 16)", "(2, 3, 16)", "128"),
        ("sum outside the layers", "264"),
        ("layer 0", "1 × 656 = 656"),
        ("total", "920"),
    ]:
        assert row in shown


def test_memory_and_work_of_one_layer(inspect):
    shown = rows(inspect(ONE_LAYER, "--batch", 2, "--length", 3, "--dtype", "bfloat16"))
    for row in [
        ("weights in float32", "3,680 bytes (3.7 kB)"),
        ("weights in bfloat16", "1,840 bytes (1.8 kB)"),
        ("cache in bfloat16", "32 bytes for each token"),
        ("1,024 bytes (1.0 kB) for the window of 32",),
        ("192 bytes for 2 × 3",),
        ("work for a token that reads 3 positions",),
        # 2·(4·64 + 3·128 + 128) and 4·2·4·3
        ("forward", "1,632 FLOPs = 2 × 768 + 96"),
        ("training, about 3 ×", "4,896 FLOPs"),
    ]:
        assert row in shown


def test_different_layers_are_shown_apart_and_equal_ones_once(inspect, write):
    text = inspect(write(mixed()))
    headings = [line for line in text.splitlines() if re.match(r"layers? \d", line)]
    assert headings == ["layers 0, 2–3 (3 ×)", "layer 1 (1 ×)", "layer 4 (1 ×)"]
    assert text.count("causal attention, window 16") == 1
    assert ("add learned positions", "(128, 40)", "(1, 128, 40)", "5,120") in rows(text)
    assert ("head, tied to the embedding", "–", "(1, 128, 61)", "–") in rows(text)


def test_rotary_settings_and_windows_are_shown_for_each_kind(inspect, write):
    shown = rows(inspect(write(mixed())))
    start = shown.index(("positions, layers 0, 2–3",))
    # The slowest of three pairs is interpolated whole: 4 · 2π · 500000^(2/3).
    assert shown[start + 1 : start + 8] == [
        ("read", "the last 16, its own too"),
        ("position table", "learned"),
        ("rotary base", "500,000"),
        ("rotated channels", "6 of 10, interleaved"),
        ("scaling rule", "yarn, factor 4, original window 32"),
        ("attention factor", "1.138629"),
        ("longest wavelength", "158,326 positions"),
    ]
    start = shown.index(("positions, layer 1",))
    assert shown[start + 1 : start + 4] == [
        ("read", "all up to its own"),
        ("position table", "learned"),
        ("rotary", "none"),
    ]


def test_a_full_window_makes_the_cache_grow_less(inspect, write):
    shown = rows(inspect(write(mixed())))
    each = 2 * 2 * 10 * 4
    assert ("cache in float32", f"{5 * each} bytes for each token") in [
        tuple(cell.replace(",", "") for cell in cells) for cells in shown
    ]
    assert (f"{2 * each} for each once the windows of layers are full",) in shown
    assert (f"{each * (3 * 16 + 2 * 128):,} bytes (48.6 kB) for the window of 128",) in shown


def test_eighty_columns_hold_a_large_model(inspect, write, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = inspect(write(large()))
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text  # nothing was cut off
    for unbroken in [
        "scores (1, 32, 131072, 131072)",
        "two (4096, 14336)",
        "two (1, 8, 131072, 128)",
        "218,112,000",
        "8,030,261,248",
    ]:
        assert unbroken in text


def test_without_a_terminal_there_is_no_escape_and_no_broken_row(inspect, write):
    text = inspect(write(large()))
    assert "\x1b" not in text
    assert (
        "join heads, output projection, residual",
        "(4096, 4096)",
        "(1, 131072, 4096)",
        "16,777,216",
    ) in rows(text)


def test_json_says_the_same_on_one_line(inspect):
    line = inspect(ONE_LAYER, "--batch", 2, "--length", 3, "--json")
    assert line.count("\n") == 1
    facts = json.loads(line)
    (layers,) = facts["layers"]
    assert layers["indices"] == [0]
    assert layers["parameters_each"] == 656
    assert layers["steps"][6] == {
        "step": "gate and up",
        "weights": [
            {"name": f"feedforward.{name}.weight", "shape": [8, 16], "stored_shape": [16, 8]}
            for name in ("gate", "up")
        ],
        "outputs": [{"name": "", "shape": [2, 3, 16]}] * 2,
        "parameters": 256,
    }
    assert facts["parameters"] == {
        "layers": 656,
        "outside": 264,
        "total": 920,
        "active": 920,
    }
    assert facts["weights_bytes"] == {"float32": 3680, "bfloat16": 1840}
    assert facts["cache"] == {
        "dtype": "float32",
        "bytes_first_token": 64,
        "bytes_last_token": 64,
        "bytes_window": 2048,
        "bytes_batch": 384,
    }
    assert facts["flops"]["forward_per_token"] == 1632
    assert "4·h·d_h·n" in facts["flops"]["formula"]
    (positions,) = facts["positions"]["attention"]
    assert positions["rotary"]["longest_wavelength"] == pytest.approx(628.3185307)


def test_a_json_configuration_is_read_too(inspect, write):
    assert ("total", "8,030,261,248") in rows(inspect(write(large(), "model.json")))


def test_a_configuration_needs_no_torch():
    program = (
        "import sys; from armillary.cli import main; "
        f"code = main(['inspect', {ONE_LAYER!r}]); sys.exit(code or 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["absent.yaml"], "absent.yaml: cannot be read"),
        (["no-such-alias"], "no-such-alias"),
        ([ONE_LAYER, "--length", "0"], "'--length'"),
        ([ONE_LAYER, "--batch", "-1"], "'--batch'"),
        ([ONE_LAYER, "--length", "9" * 400], "'--length'"),
        ([ONE_LAYER, "--batch", "9" * 400], "'--batch'"),
        ([ONE_LAYER, "--dtype", "int8"], "'--dtype'"),
        ([], "MODEL"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, message, capsys):
    assert main(["inspect", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("armillary: ")
    assert message in captured.err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("vocab_size: [", "not YAML"),
        ("- 1", "a configuration is a mapping"),
        ("vocab_sise: 16", "vocab_size"),
    ],
)
def test_a_bad_configuration_is_one_line(text, message, tmp_path, capsys):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    assert main(["inspect", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"{path}: " in error
    assert message in error


def test_a_length_past_a_learned_table_is_refused(write, capsys):
    assert main(["inspect", str(write(mixed())), "--length", "129"]) == 2
    assert "the learned position table ends at 128" in capsys.readouterr().err


def test_the_config_of_a_checkpoint_points_to_its_directory(tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "llama", "hidden_size": 40}')
    assert main(["inspect", str(path)]) == 2
    assert "name a checkpoint by its directory" in capsys.readouterr().err


def test_a_checkpoint_adds_its_encodings_and_notices(inspect, tmp_path, monkeypatch):
    """A reader stands in: what matters is what is made of its answer."""
    asked = {}

    def read(path: Path, *, ignore_keys: tuple[str, ...]) -> Checkpoint:
        asked.update(path=path, ignore_keys=ignore_keys)
        stored = {
            name: StoredTensor(name, (3, 32), encoding, np.zeros(count, np.uint8), "here")
            for name, encoding, count in [("a", "F16", 192), ("b", "Q8_0", 102), ("c", "F16", 192)]
        }
        return Checkpoint(mixed(), stored, None, {}, path, "gguf", ["rope_theta is not given"])

    monkeypatch.setattr("armillary.checkpoints.open_checkpoint", read)
    path = tmp_path / "model.gguf"
    path.touch()
    facts = json.loads(inspect(path, "--json", "--ignore-key", "a", "--ignore-key", "b"))
    assert asked == {"path": path, "ignore_keys": ("a", "b")}
    assert facts["stored_bytes"] == {"F16": 384, "Q8_0": 102}
    assert facts["notices"] == ["rope_theta is not given"]
    assert facts["tokenizer"] is None
    shown = rows(inspect(path))
    assert ("note: rope_theta is not given",) in shown
    assert ("weights in the file", "486 bytes: F16 384 bytes, Q8_0 102 bytes") in shown
    assert ("tokenizer",) not in shown


@pytest.mark.download
def test_smollm2_from_its_file(inspect):
    path = smollm2_gguf()
    facts = json.loads(inspect(path, "--json"))
    assert facts["parameters"]["total"] == 134_515_008
    assert facts["window"] == 8192
    assert facts["format"] == "gguf"
    # Header, metadata and padding are the rest of the file.
    assert 0.97 * path.stat().st_size < sum(facts["stored_bytes"].values()) < path.stat().st_size
    assert facts["cache"]["bytes_first_token"] == 2 * 30 * 3 * 64 * 4
    assert facts["tokenizer"] == {
        "vocab_size": 49152,
        "bos": {"id": 1, "text": "<|im_start|>"},
        "eos": [{"id": 2, "text": "<|im_end|>"}, {"id": 0, "text": "<|endoftext|>"}],
        "chat_template": True,
    }
    shown = rows(inspect(path))
    assert ("layers 0–29 (30 ×)",) in shown
    assert ("layers 0–29", "30 × 3,540,096 = 106,202,880") in shown
    assert ("total", "134,515,008") in shown
    assert ("BOS", "1 '<|im_start|>'") in shown
    assert ("rotary base", "100,000") in shown


def test_help_begins_with_examples(inspect):
    text = inspect("--help")
    assert text.index("armillary inspect smollm2-135m") < text.index("--batch")
