"""Which engine is taken where, and what is refused."""

import os

import pytest

from armillary import engine_choice
from armillary.engine_choice import choose_engine, gpu_expected
from armillary.errors import UserError


@pytest.mark.parametrize(
    ("device", "dtype", "gpu", "expected"),
    [
        ("auto", "auto", False, "numba"),
        ("auto", "float32", False, "numba"),
        ("auto", "bfloat16", False, "numba"),
        ("auto", "auto", True, "torch"),
        ("cpu", "auto", True, "numba"),
        ("cuda", "auto", True, "torch"),
        ("cuda:1", "auto", False, "torch"),
        ("cpu", "float16", False, "torch"),
        ("cpu", "float64", False, "torch"),
        ("cpu", "float8", False, "torch"),
    ],
)
def test_auto_is_numba_on_the_cpu_where_it_has_the_type(monkeypatch, device, dtype, gpu, expected):
    monkeypatch.setattr(engine_choice, "gpu_expected", lambda: gpu)
    assert choose_engine("auto", device, dtype) == expected


def test_an_engine_that_is_named_is_taken_whatever_is_there(monkeypatch):
    monkeypatch.setattr(engine_choice, "gpu_expected", lambda: True)
    assert choose_engine("numba", "auto", "auto") == "numba"
    assert choose_engine("torch", "cpu", "auto") == "torch"


@pytest.mark.parametrize(
    ("engine", "device", "dtype", "words"),
    [
        ("llama", "cpu", "auto", ["'llama'", "auto, torch, numba"]),
        ("numba", "cuda:1", "auto", ["'cuda:1'", "CPU", "--engine torch"]),
        ("numba", "cpu", "float16", ["'float16'", "auto, float32, bfloat16", "--engine torch"]),
        ("numba", "auto", "float64", ["'float64'", "--engine torch"]),
    ],
)
def test_what_numba_has_not_is_refused_with_the_remedy(engine, device, dtype, words):
    with pytest.raises(UserError) as raised:
        choose_engine(engine, device, dtype)
    assert all(word in str(raised.value) for word in words)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("there", "visible", "expected"),
    [
        (True, None, True),
        (True, "0,1", True),
        (True, "", False),
        (True, "-1", False),
        (False, None, False),
        (False, "0", False),
    ],
)
def test_a_gpu_is_expected_by_its_drivers_files(monkeypatch, there, visible, expected):
    monkeypatch.setattr(os.path, "exists", lambda path: there and path == "/dev/nvidiactl")
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpu_expected() is expected


def test_a_type_of_the_cache_is_for_numba(monkeypatch):
    monkeypatch.setattr(engine_choice, "gpu_expected", lambda: False)
    for cache in ("auto", "float32", "bfloat16", "int8"):
        assert choose_engine("auto", "auto", "auto", cache) == "numba"
    assert choose_engine("torch", "cpu", "auto", "auto") == "torch"
    for engine, dtype in (("torch", "auto"), ("auto", "float16")):
        with pytest.raises(UserError, match="cache type 'int8' is for the numba engine"):
            choose_engine(engine, "cpu", dtype, "int8")
    with pytest.raises(UserError, match="'q8_0' is not known; known are auto, float32, bfloat16"):
        choose_engine("auto", "cpu", "auto", "q8_0")
