"""Formats are told apart by what is there; nothing is unpickled, and nothing imports torch."""

import pickle
import subprocess
import sys
import zipfile

import pytest

from armillary.checkpoints import open_checkpoint, save_armillary
from armillary.checkpoints.tensors import TensorToWrite
from armillary.errors import CheckpointError
from armillary.files import set_aside
from support.llama_files import write_gguf, write_huggingface_directory
from support.models import arrays, build, config
from support.tiny_model import tiny_tokenizer


def test_each_format_is_recognised(tmp_path):
    tensors = [
        TensorToWrite(name, "F64", array.shape, [array])
        for name, array in arrays(build(config())).items()
    ]
    save_armillary(tmp_path / "own", config(), tensors)
    write_huggingface_directory(tmp_path / "hf")
    write_gguf(tmp_path / "no_suffix")
    assert open_checkpoint(tmp_path / "own").format == "armillary"
    assert open_checkpoint(str(tmp_path / "hf")).format == "huggingface"
    assert open_checkpoint(tmp_path / "no_suffix").format == "gguf"


class Trap:
    """Creates a file when it is unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return (open, (str(self.marker), "w"))


@pytest.mark.parametrize("name", ["m.pth", "m.pt", "m.bin", "m.ckpt", "m.pkl", "no_suffix"])
@pytest.mark.parametrize("zipped", [False, True])
def test_a_pickle_is_refused_and_not_run(tmp_path, name, zipped):
    """Cases.md 79."""
    marker = tmp_path / "marker"
    content = pickle.dumps(Trap(marker))
    if zipped:
        with zipfile.ZipFile(tmp_path / name, "w") as archive:
            archive.writestr("archive/data.pkl", content)
    else:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match="looks like a pickle, and nothing is unpickled"):
        open_checkpoint(tmp_path / name)
    assert not marker.exists()
    pickle.loads(content).close()
    assert marker.exists()  # the trap works


def test_a_configuration_alone_is_no_checkpoint(tmp_path):
    (tmp_path / "one.yaml").write_text("vocab_size: 16")
    with pytest.raises(CheckpointError, match=r"one\.yaml: holds a configuration but no weights"):
        open_checkpoint(tmp_path / "one.yaml")


def test_tokens_that_the_model_does_not_know_are_noticed(tmp_path):
    directory = write_huggingface_directory(tmp_path / "m", bos_token_id=None)
    tiny_tokenizer(directory)
    assert open_checkpoint(directory).notices == [
        "the tokenizer has tokens up to 258, the model knows those up to 60; a prompt with another "
        "one is refused"
    ]


def write_gguf_inside(path):
    path.mkdir()
    write_gguf(path / "a.gguf")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "m: does not exist$"),
        (lambda path: path.write_bytes(b""), "m: is cut off: 4 bytes are due"),
        (
            lambda path: path.write_bytes(b"hello world"),
            "m: is no GGUF file: it begins with b'hell'",
        ),
        (lambda path: path.mkdir(), "m: holds no config.json$"),
        (write_gguf_inside, "no config.json; to read a.gguf, name the file"),
        (lambda path: set_aside(path).mkdir(), "does not exist; an interrupted save left the one"),
    ],
)
def test_what_is_no_checkpoint_is_one_line(tmp_path, make, message):
    make(tmp_path / "m")
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(tmp_path / "m")
    assert "\n" not in str(caught.value)


def test_a_file_of_weights_alone_asks_for_the_directory(tmp_path):
    directory = write_huggingface_directory(tmp_path / "m")
    with pytest.raises(CheckpointError, match="give the directory with its config.json"):
        open_checkpoint(directory / "model.safetensors")


def test_opening_needs_no_torch(tmp_path):
    write_huggingface_directory(tmp_path / "m")
    write_gguf(tmp_path / "m.gguf")
    code = """
import sys
from armillary.checkpoints import open_checkpoint
for path in sys.argv[1:]:
    open_checkpoint(path).tensors["embedding.weight"].to_float32()
heavy = {"torch", "transformers", "matplotlib"} & set(sys.modules)
sys.exit(f"imported: {heavy}" if heavy else 0)
"""
    paths = [str(tmp_path / "m"), str(tmp_path / "m.gguf")]
    subprocess.run([sys.executable, "-c", code, *paths], check=True)
