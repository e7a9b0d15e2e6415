"""What is compiled, and that a machine without compilers trains all the same."""

import copy
import re

import pytest
import torch

from armillary.config import RotaryConfig
from armillary.decoder import Decoder
from armillary.training.compilation import compile_objective
from armillary.training.native import build
from armillary.training.objective import Objective
from support.models import config, layer

CPU = torch.device("cpu")
TOKENS = torch.arange(24).reshape(2, 12)


def total(objective):
    return objective(TOKENS, TOKENS.roll(-1, 1)).total


def test_torch_compiles_other_layers_and_names_stay():
    objective = Objective(Decoder(config(layer())))
    names = list(objective.state_dict())
    expected = total(copy.deepcopy(objective))
    how = compile_objective(objective, torch.float32, CPU)
    assert list(objective.state_dict()) == names
    torch.testing.assert_close(total(objective), expected, rtol=1e-5, atol=0)
    assert "compiled by torch" in how or "not compiled" in how


def test_without_a_compiler_a_line_says_so_and_nothing_changes(monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("no C++ compiler found\nand a long explanation")

    monkeypatch.setattr(torch, "compile", fail)
    monkeypatch.setenv("CC", "no-such-compiler")
    build.kernels.cache_clear()
    turn = RotaryConfig(d_rotary=32)
    model = config(
        layer(attention={"d_head": 32, "rotary": turn}, feedforward={"d_ff": 32}), d_model=64
    )
    objective = Objective(Decoder(model))
    expected = total(objective)
    how = compile_objective(objective, torch.bfloat16, CPU)
    build.kernels.cache_clear()
    assert how == "not compiled, which is slower: no C++ compiler found"
    assert torch.equal(total(objective), expected)


def test_a_compiler_that_fails_is_named(monkeypatch, tmp_path):
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\necho 'kernels.c:1: error: something is missing' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    build.kernels.cache_clear()
    wanted = f"{compiler} fails: kernels.c:1: error: something is missing"
    with pytest.raises(build.NotBuiltError, match=f"^{re.escape(wanted)}$"):
        build.kernels()
    build.kernels.cache_clear()
