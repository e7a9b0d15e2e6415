"""What the doctor says of a small trained model, sound or with what cannot be a model at all."""

from dataclasses import replace

import numpy as np
import pytest

from armillary.checkpoints.safetensors import read_safetensors, write_safetensors
from armillary.checkpoints.tensors import to_write
from armillary.diagnosis.doctor import examine
from armillary.diagnosis.probe_text import built_in_texts
from armillary.errors import UserError
from support import faults


def look(path, **options):
    return examine(path, built_in_texts(), lambda *_: None, **options)


def as_float32(checkpoint, folder):
    return faults.as_huggingface(checkpoint, folder, "F32")


@pytest.mark.parametrize("write", [faults.as_ours, as_float32, faults.as_gguf])
def test_the_sound_model_is_healthy_in_every_format(learned, tmp_path, write):
    report = look(write(learned, tmp_path))
    assert report.diagnosis == "healthy"
    assert report.findings == []
    assert all(check.holds is not False for check in report.checks)


def test_two_faults_are_found_one_after_the_other(learned, tmp_path):
    """Neither alone brings the text back to what it cost."""
    layers = range(learned.config.n_layers)
    twice = faults.exchanged(learned, "feedforward.gate", "feedforward.up", layers)
    report = look(faults.unpermuted_huggingface(twice, tmp_path))
    assert {finding.code for finding in report.findings} == {"layout", "swapped-gate-up"}
    assert report.cured == pytest.approx(look(learned.source).loss, abs=0.02)


def test_what_is_measured_is_told_with_a_patch_for_the_file(learned, tmp_path):
    config = faults.with_rotary(learned.config, base=5e5)
    report = look(as_float32(replace(learned, config=config), tmp_path))
    (finding,) = report.findings
    assert finding.patch == {"rope_theta": 10_000.0}
    assert finding.patch_file == "config.json"
    assert report.loss - report.cured > 0.1
    assert f"{report.loss:.2f} nats a token, {report.cured:.2f}" in finding.evidence


def test_an_untrained_model_is_implausible_and_no_change_is_named(learned, tmp_path):
    """Whatever made random weights cheaper would do so by chance."""
    rng = np.random.default_rng(0)
    noise = {
        name: faults.stored(name, rng.normal(0, 0.2, tensor.shape))
        for name, tensor in learned.tensors.items()
        if len(tensor.shape) == 2
    }
    report = look(faults.as_ours(faults.with_tensors(learned, noise), tmp_path))
    assert [finding.code for finding in report.findings] == ["implausible"]


def test_a_missing_tensor_is_a_finding_and_a_strange_file_an_error(learned, tmp_path):
    """What a known model's files lack can be told; of another file nothing can."""
    target = as_float32(learned, tmp_path)
    path = target / "model.safetensors"
    tensors = read_safetensors(path)
    left = [to_write(t, "F32") for name, t in tensors.items() if name != "model.norm.weight"]
    write_safetensors(tmp_path / "less", left)
    (tmp_path / "less").rename(path)
    report = look(target)
    assert report.findings[0].code == "unreadable"
    assert "model.norm.weight" in report.diagnosis
    (tmp_path / "strange.gguf").write_bytes(b"\x80not a model")
    with pytest.raises(UserError, match="pickle"):
        look(tmp_path / "strange.gguf")


@pytest.mark.download
def test_smollm2_with_a_foreign_tokenizer_of_the_same_size(tmp_path):
    """StarCoder's vocabulary has 49,152 tokens too; only the embedding tells."""
    from armillary.checkpoints import open_checkpoint
    from armillary.checkpoints.gguf_file import read_gguf_file
    from armillary.diagnosis.vocabulary import kinship
    from armillary.tokenizer import Tokenizer
    from support.downloads import llama_cpp_vocabularies, smollm2_gguf

    checkpoint = open_checkpoint(smollm2_gguf())
    embedding = checkpoint.tensors["embedding.weight"].to_float32()
    path = llama_cpp_vocabularies() / "ggml-vocab-starcoder.gguf"
    foreign = Tokenizer.from_gguf(read_gguf_file(path).metadata)
    assert foreign.vocab_size == checkpoint.tokenizer.vocab_size
    assert kinship(checkpoint.tokenizer, embedding).share > 0.95
    assert kinship(foreign, embedding).share < 0.55
