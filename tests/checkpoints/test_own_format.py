"""Our own directories: written atomically and tensor by tensor, checked when opened."""

import json

import numpy as np
import pytest

from armillary.checkpoints import open_checkpoint, save_armillary
from armillary.checkpoints.parameters import parameter_shapes
from armillary.checkpoints.tensors import TensorToWrite, encode
from armillary.config import DecoderConfig
from armillary.errors import CheckpointError, ConfigError, UserError
from armillary.files import write_manifest
from support.memory import allocates_less_than
from support.models import VARIANTS, arrays, build, config

GENERATION = {"eos_token_id": (2, 7), "temperature": 0.6}


def save(directory, config, weights, **options):
    tensors = (
        TensorToWrite(name, "F64", array.shape, [np.ascontiguousarray(array)])
        for name, array in weights.items()
    )
    save_armillary(directory, config, tensors, **options)


@pytest.fixture
def saved(tmp_path):
    save(tmp_path / "m", config(), arrays(build(config())), generation=GENERATION)
    return tmp_path / "m"


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_is_saved_and_opened_exactly(tmp_path, variant):
    weights = arrays(build(VARIANTS[variant]))
    save(tmp_path / "m", VARIANTS[variant], weights, generation=GENERATION)
    checkpoint = open_checkpoint(tmp_path / "m", verify=True)
    assert checkpoint.config == VARIANTS[variant]
    assert checkpoint.generation == GENERATION
    assert checkpoint.format == "armillary"
    assert set(checkpoint.tensors) == set(weights)
    for name, array in weights.items():
        assert checkpoint.tensors[name].data.tobytes() == array.tobytes()


def test_the_directory_holds_what_it_says(saved):
    names = ["config.json", "generation.json", "manifest.json", "model.safetensors"]
    assert sorted(path.name for path in saved.iterdir()) == names
    entries = json.loads((saved / "config.json").read_text())
    assert (entries.pop("format"), entries.pop("format_version")) == ("armillary", 1)
    assert DecoderConfig.from_dict(entries) == config()


def test_an_older_save_is_replaced_and_nothing_is_left_beside(saved):
    other = VARIANTS["tied head"]
    save(saved, other, arrays(build(other)))
    assert open_checkpoint(saved).config == other
    assert [path.name for path in saved.parent.iterdir()] == ["m"]


def test_a_save_that_fails_keeps_the_older_one(saved):
    def failing():
        yield np.zeros(1)
        raise KeyboardInterrupt

    shapes = parameter_shapes(config())
    tensors = [TensorToWrite(name, "F64", shape, failing()) for name, shape in shapes.items()]
    with pytest.raises(KeyboardInterrupt):
        save_armillary(saved, config(), tensors)
    open_checkpoint(saved, verify=True)
    assert [path.name for path in saved.parent.iterdir()] == ["m"]


def test_a_directory_of_somebody_elses_is_not_replaced(tmp_path):
    (tmp_path / "letter.txt").write_text("dear")
    with pytest.raises(UserError, match="was not saved by armillary"):
        save(tmp_path, config(), arrays(build(config())))
    assert (tmp_path / "letter.txt").read_text() == "dear"


def test_saving_holds_one_tensor_at_a_time(tmp_path):
    """Cases.md 81: extra memory stays under twice the largest tensor."""
    plain = config()
    big = plain.model_copy(update={"vocab_size": 20_000})
    largest = 20_000 * 40 * 4

    def chunks(shape):
        yield np.zeros(shape, np.float32)

    shapes = parameter_shapes(big)
    tensors = [TensorToWrite(name, "F32", shape, chunks(shape)) for name, shape in shapes.items()]
    with allocates_less_than(2 * largest):
        save_armillary(tmp_path / "m", big, tensors)


def test_quantised_blocks_are_saved_and_opened_as_they_are(tmp_path):
    """Of a version that says so; a directory without any stays one that older readers read."""
    wide = config(d_model=64)
    shapes = parameter_shapes(wide)
    rng = np.random.default_rng(0)
    numbers = {name: rng.normal(size=shape).astype("f4") for name, shape in shapes.items()}
    encodings = {
        name: "Q4_1" if len(shape) == 2 and shape[1] % 32 == 0 else "F32"
        for name, shape in shapes.items()
    }
    assert {encodings[f"layers.0.feedforward.{part}.weight"] for part in ("up", "down")} == {
        "Q4_1",
        "F32",
    }
    written = {name: encode(numbers[name], encodings[name]) for name in shapes}
    tensors = [TensorToWrite(n, encodings[n], shapes[n], [written[n]]) for n in shapes]
    save_armillary(tmp_path / "m", wide, tensors)
    assert json.loads((tmp_path / "m" / "config.json").read_text())["format_version"] == 2
    found = open_checkpoint(tmp_path / "m", verify=True).tensors
    for name, tensor in found.items():
        assert (tensor.encoding, tensor.shape) == (encodings[name], shapes[name])
        np.testing.assert_array_equal(tensor.data, written[name])


def rewrite(path, change):
    entries = json.loads(path.read_text())
    change(entries)
    path.write_text(json.dumps(entries))


def with_manifest(change):
    """Damage that the manifest would show first, so it is written anew."""

    def damage(directory):
        change(directory)
        write_manifest(directory)

    return damage


def flip(directory):
    path = directory / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def edit(**entries):
    return with_manifest(lambda d: rewrite(d / "config.json", lambda old: old.update(entries)))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: (d / "model.safetensors").unlink(), "model.safetensors is in the manifest but"),
        (lambda d: (d / "model.safetensors").write_bytes(b""), "has 0 bytes, the manifest says"),
        (flip, "its SHA-256 is not the manifest's"),
        (lambda d: (d / "manifest.json").unlink(), "manifest.json: cannot be read"),
        (edit(format_version=3), "is of format version 3; 1 and 2 are read"),
        (edit(d_modle=40), "d_modle"),
        (edit(vocab_size=62), r"'embedding.weight' has shape \[61, 40\], .* asks for \[62, 40\]"),
        (edit(tie_head=True), "belonging to no parameter 'head.weight'"),
        (
            with_manifest(lambda d: (d / "generation.json").write_text('{"eos_token_id": 2}')),
            "eos_token_id must be a list of token ids, not 2",
        ),
    ],
)
def test_a_damaged_directory_is_refused_in_one_line(saved, damage, message):
    damage(saved)
    with pytest.raises((CheckpointError, ConfigError), match=message) as caught:
        open_checkpoint(saved, verify=True)
    assert "\n" not in str(caught.value)


def test_a_changed_byte_is_seen_only_by_the_full_check(saved):
    flip(saved)
    open_checkpoint(saved)
    with pytest.raises(CheckpointError, match="SHA-256"):
        open_checkpoint(saved, verify=True)


def test_tensors_that_are_not_the_parameters_are_a_programming_error(tmp_path):
    weights = arrays(build(config()))
    del weights["head.weight"]
    with pytest.raises(ValueError, match=r"not: head\.weight"):
        save(tmp_path / "m", config(), weights)
    assert list(tmp_path.iterdir()) == []
