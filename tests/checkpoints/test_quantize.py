"""Which weights are quantised to what, and that both formats then hold the same."""

import numpy as np
import pytest

from armillary.checkpoints import open_checkpoint, save_armillary
from armillary.checkpoints.quantize import TARGETS, bytes_of, choose_encodings, write_encoded
from armillary.checkpoints.tensors import encode
from armillary.config import DecoderConfig
from armillary.weights import to_write
from support.memory import allocates_less_than
from support.models import VARIANTS, build, config, layer
from support.tiny_model import tiny_tokenizer

# Rows of 64 are blocks of 32, those of d_ff 24 and of 6 heads of 10 are not.
WIDE = config(*[layer()] * 2, d_model=64)


def saved(directory, config, tokenizer=None):
    save_armillary(directory, config, to_write(build(config)), tokenizer, {"eos_token_id": [2]})
    return open_checkpoint(directory)


def chosen(checkpoint, target):
    return choose_encodings(checkpoint, TARGETS[target])


def test_matrices_are_quantised_vectors_kept_and_what_is_no_whole_blocks_halved(tmp_path):
    encodings, notices = chosen(saved(tmp_path / "m", WIDE), "q8_0")
    for name, encoding in encodings.items():
        if "norm" in name:
            assert encoding == "F32"
        elif name.endswith(("attention.out.weight", "feedforward.down.weight")):
            assert encoding == "F16"
        else:
            assert encoding == "Q8_0"
    assert notices == [
        "rows that are no multiple of 32 are written as F16, in layers.0.attention.out.weight "
        "and 3 more"
    ]


@pytest.mark.parametrize("target", ["q4_0", "q4_1"])
@pytest.mark.parametrize("tied", [False, True])
def test_the_matrix_that_gives_the_logits_keeps_eight_bits(tmp_path, target, tied):
    encodings, _ = chosen(saved(tmp_path / "m", WIDE.model_copy(update={"tie_head": tied})), target)
    assert encodings.get("head.weight", "Q8_0") == "Q8_0"
    assert encodings["embedding.weight"] == ("Q8_0" if tied else TARGETS[target])
    assert encodings["layers.0.attention.q.weight"] == TARGETS[target]


@pytest.mark.parametrize(
    ("target", "shorter", "logits"),
    [("q4_k", "Q5_0", "Q8_0"), ("q5_k", "Q5_1", "Q8_0"), ("q6_k", "Q8_0", "Q6_K")],
)
def test_rows_of_no_whole_super_blocks_have_shorter_blocks_and_it_is_said(
    tmp_path, target, shorter, logits
):
    """d_model 256 is one; 96, of d_ff, is three blocks of 32; 60, of the heads, is neither."""
    sizes = {"vocab_size": 61, "d_model": 256, "n_layers": 1, "n_heads": 6, "d_head": 10}
    config = DecoderConfig.uniform(**sizes, d_ff=96, max_positions=32)
    encodings, notices = chosen(saved(tmp_path / "m", config), target)
    assert encodings["head.weight"] == logits
    assert encodings["layers.0.attention.q.weight"] == TARGETS[target]
    assert encodings["layers.0.attention.out.weight"] == "F16"
    assert encodings["layers.0.feedforward.down.weight"] == shorter
    assert notices == [
        "rows that are no multiple of 32 are written as F16, in layers.0.attention.out.weight",
        f"rows that are no multiple of 256 are written as {shorter}, in "
        "layers.0.feedforward.down.weight",
    ]


def test_biases_and_a_table_of_positions_stay_as_exact_as_they_were(tmp_path):
    wide = VARIANTS["learned"].model_copy(update={"d_model": 64, "head_bias": True})
    encodings, _ = chosen(saved(tmp_path / "m", wide), "q8_0")
    assert encodings["position_table.weight"] == encodings["head.bias"] == "F32"


def test_bf16_has_no_blocks_and_nothing_to_notice(tmp_path):
    encodings, notices = chosen(saved(tmp_path / "m", WIDE), "bf16")
    assert set(encodings.values()) == {"BF16", "F32"}
    assert encodings["layers.0.attention.out.weight"] == "BF16"
    assert notices == []


@pytest.mark.parametrize("name", ["m.gguf", "m"])
@pytest.mark.parametrize("target", TARGETS)
def test_what_is_written_is_the_quantised_weights(tmp_path, target, name):
    before = saved(tmp_path / "before", WIDE)
    encodings, _ = chosen(before, target)
    write_encoded(tmp_path / name, before, encodings)
    after = open_checkpoint(tmp_path / name)
    assert after.config == before.config
    assert after.format == ("gguf" if name == "m.gguf" else "armillary")
    assert bytes_of(after) == bytes_of(before, encodings)
    for key, tensor in after.tensors.items():
        assert tensor.encoding == encodings[key]
        np.testing.assert_array_equal(
            tensor.stored_rows(0, tensor.n_rows).reshape(-1),
            encode(before.tensors[key].to_float32(), encodings[key]),
            err_msg=key,
        )


@pytest.mark.parametrize("name", ["m.gguf", "m"])
def test_blocks_that_stay_what_they_are_are_copied_and_others_add_up(tmp_path, name):
    before = saved(tmp_path / "before", WIDE)
    write_encoded(tmp_path / "q8", before, chosen(before, "q8_0")[0])
    q8 = open_checkpoint(tmp_path / "q8")
    encodings, notices = chosen(q8, "q8_0")
    assert not any("add up" in notice for notice in notices)
    write_encoded(tmp_path / name, q8, encodings)
    for key, tensor in open_checkpoint(tmp_path / name).tensors.items():
        np.testing.assert_array_equal(tensor.to_float32(), q8.tensors[key].to_float32())
    (notice,) = [each for each in chosen(q8, "q4_0")[1] if "add up" in each]
    assert notice.startswith("the model is quantised already (Q8_0), and the errors add up")


def test_tokenizer_and_generation_come_along(tmp_path):
    tokenizer = tiny_tokenizer(tmp_path / "t")
    wide = WIDE.model_copy(update={"vocab_size": tokenizer.vocab_size})
    before = saved(tmp_path / "before", wide, tokenizer)
    for name in ("m.gguf", "m"):
        write_encoded(tmp_path / name, before, chosen(before, "q4_1")[0])
        after = open_checkpoint(tmp_path / name)
        assert after.tokenizer.encode("hello, é") == tokenizer.encode("hello, é")
        assert after.generation["eos_token_id"][0] == 2


@pytest.mark.parametrize("name", ["m.gguf", "m"])
@pytest.mark.parametrize("target", TARGETS)
def test_writing_holds_a_block_of_rows_at_a_time(tmp_path, target, name):
    """The issue allows a tensor; the largest here has 15 MB, and 60 MB are written in all."""
    sizes = {"vocab_size": 15_000, "d_model": 256, "n_layers": 2, "n_heads": 2, "d_ff": 256}
    big = DecoderConfig.uniform(**sizes, max_positions=64)
    before = saved(tmp_path / "before", big)
    encodings, _ = chosen(before, target)
    taken = []
    with allocates_less_than(12 << 20):
        write_encoded(tmp_path / name, before, encodings, taken.append)
    assert sum(taken) == bytes_of(before, encodings)


@pytest.mark.parametrize("name", ["m.gguf", "m"])
def test_an_interruption_leaves_nothing(tmp_path, name):
    before = saved(tmp_path / "before", WIDE)

    def interrupted(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_encoded(tmp_path / name, before, chosen(before, "q8_0")[0], interrupted)
    assert [path.name for path in tmp_path.iterdir()] == ["before"]
