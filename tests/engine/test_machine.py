"""What a processor is taken for, by its features."""

import pytest

from armillary.engine import machine
from armillary.engine.machine import Machine, host

X86, ARM, MAC = "x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu", "arm64-apple-darwin"


@pytest.mark.parametrize(
    ("triple", "features", "dot"),
    [
        (X86, "avx2 avx512f avx512vl avx512vnni", "vnni"),
        (X86, "avx2 avxvnni", "vnni"),
        # Without the narrow forms the wide instruction is of no use.
        (X86, "avx2 avx512f avx512vnni", "avx2"),
        (X86, "avx2 fma", "avx2"),
        (X86, "avx sse4.2", "plain"),
        (X86, "", "plain"),
        (ARM, "neon dotprod", "neon"),
        (MAC, "neon dotprod", "neon"),
        (ARM, "neon", "plain"),
        # Another processor's features say nothing.
        (ARM, "avx2 avxvnni", "plain"),
        (X86, "dotprod", "plain"),
        ("riscv64-unknown-linux-gnu", "v", "plain"),
    ],
)
def test_bytes_are_multiplied_by_what_there_is(triple: str, features: str, dot: str) -> None:
    found = Machine.of(triple, "generic", dict.fromkeys(features.split(), True))
    assert found.int8_dot == dot
    assert found.features == ",".join("+" + each for each in features.split())


def test_what_is_absent_is_said_to_be() -> None:
    features = {"avx2": True, "avx512vl": True, "avx512vnni": False, "avxvnni": False}
    found = Machine.of(X86, "generic", features)
    assert found.int8_dot == "avx2"
    assert found.features == "+avx2,+avx512vl,-avx512vnni,-avxvnni"


def test_amx_is_used_where_the_system_allows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor may have what its system keeps to itself."""
    features = {"avx512bf16": True, "avx512bw": True, "amx-tile": True, "amx-bf16": True}
    monkeypatch.setattr(machine.llvm, "get_host_cpu_features", lambda: features)
    for allowed in (True, False):
        monkeypatch.setattr(machine, "_allowed_amx", lambda allowed=allowed: allowed)
        asked = host.__wrapped__()
        assert asked.bf16_tiles == allowed
        assert ("+amx-bf16" in asked.features) == allowed
        assert asked.bf16_dot


def test_the_host_is_asked_once() -> None:
    assert host() is host()
    assert host().cpu
