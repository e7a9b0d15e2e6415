"""Kernels are compiled for any machine, with the instructions that it has.

In another process, which ends where LLVM has no instruction for what it is asked.
"""

import json
import re
import subprocess
import sys

import pytest

ALL = ["vpdpbusd", "vpmaddubsw", "sdot", "fmla", "vfmadd231ps", "vcvtph2ps"]
PAIRS = {
    "avx512-vnni": "vpdpwssd",
    "avx-vnni": "vpmaddwd",
    "avx2": "vpmaddwd",
    "old x86": "pmaddwd",
    "arm with dot products": "smull",
    "apple": "smull",
    "arm without": "smull",
}
"""What multiplies the int16 of a cache in int8, which LLVM finds by itself."""
MACHINES: dict[str, tuple[str, str, str, set[str]]] = {
    # Triple, processor, features, and which of the instructions above there are.
    "avx512-vnni": (
        "x86_64-unknown-linux-gnu",
        "icelake-server",
        "avx avx2 fma f16c avx512f avx512bw avx512dq avx512vl avx512vnni",
        {"vpdpbusd", "vfmadd231ps", "vcvtph2ps"},
    ),
    "avx-vnni": (
        "x86_64-pc-windows-msvc",
        "alderlake",
        "avx avx2 fma f16c avxvnni",
        {"vpdpbusd", "vfmadd231ps", "vcvtph2ps"},
    ),
    "avx2": (
        "x86_64-apple-darwin",
        "haswell",
        "avx avx2 fma f16c",
        {"vpmaddubsw", "vfmadd231ps", "vcvtph2ps"},
    ),
    "old x86": ("x86_64-unknown-linux-gnu", "x86-64", "", set()),
    "arm with dot products": (
        "aarch64-unknown-linux-gnu",
        "neoverse-n1",
        "neon dotprod fullfp16",
        {"sdot", "fmla"},
    ),
    "apple": ("arm64-apple-darwin", "apple-m1", "neon dotprod fullfp16", {"sdot", "fmla"}),
    "arm without": ("aarch64-unknown-linux-gnu", "cortex-a53", "neon", {"fmla"}),
}
PROGRAM = """
import json, sys
from armillary.engine.compiler import assembly
from armillary.engine.cache_formats import CACHE_FORMATS
from armillary.engine.formats import FORMATS
from armillary.engine.kernels import attention, product, quantise, schedule
from armillary.engine.machine import Machine

for name, (triple, cpu, features) in json.load(sys.stdin).items():
    machine = Machine.of(triple, cpu, dict.fromkeys(features.split(), True))
    forms = [FORMATS[each] for each in ("F16", "Q8_0")]
    kernels = [product.product(form, machine) for form in forms]
    kernels += [quantise.quantise(), schedule.run(machine), schedule.serve(machine)]
    int8 = CACHE_FORMATS["int8"]
    cached = [attention.queries(int8), attention.attention(int8), attention.append(int8)]
    print(json.dumps([name, assembly(kernels, machine), assembly(cached, machine)]), flush=True)
"""


@pytest.fixture(scope="module")
def both() -> dict[str, tuple[str, str]]:
    """Of each machine: products and attention, as far as the process came before it ended."""
    wanted = {name: entry[:3] for name, entry in MACHINES.items()}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps(wanted),
        capture_output=True,
        text=True,
        check=False,
    )
    made = [json.loads(line) for line in done.stdout.splitlines()]
    assert made, done.stderr
    return {name: (of_products, of_attention) for name, of_products, of_attention in made}


@pytest.fixture(scope="module")
def assemblies(both: dict[str, tuple[str, str]]) -> dict[str, str]:
    """Of each machine: products."""
    return {name: products for name, (products, _) in both.items()}


def has(assembly: str, instruction: str) -> bool:
    """Whether an instruction is used."""
    return re.search(rf"^\s*(?:\{{\w+\}}\s*)?{instruction}\b", assembly, re.MULTILINE) is not None


@pytest.mark.parametrize("name", MACHINES)
def test_a_machines_own_instructions_are_used(name: str, assemblies: dict[str, str]) -> None:
    assert name in assemblies, "LLVM gave up"
    assembly, (*_, expected) = assemblies[name], MACHINES[name]
    assert {each for each in ALL if has(assembly, each)} == expected


@pytest.mark.parametrize("name", MACHINES)
def test_a_cache_in_int8_is_multiplied_in_twos(name: str, both: dict[str, tuple[str, str]]) -> None:
    assert has(both[name][1], PAIRS[name])


@pytest.mark.parametrize("name", MACHINES)
def test_nothing_is_called_that_may_not_be_there(
    name: str, both: dict[str, tuple[str, str]]
) -> None:
    """No multiplication is a call into a library; what is called is in the same file, or in C's."""
    assembly = "\n".join(both[name])
    called = re.findall(r"\b(?:callq?|bl)[ \t]+_*([A-Za-z]\w*)\b", assembly)
    called += re.findall(r"\b_*([A-Za-z]\w*)@(?:GOTPCREL|PLT)", assembly)
    defined = re.findall(r"^_*([A-Za-z]\w*):", assembly, re.MULTILINE)
    assert set(called) <= {*defined, "memset", "memcpy"}


def test_entries_are_named_after_the_kernels(assemblies: dict[str, str]) -> None:
    for assembly in assemblies.values():
        for name in ("product_F16", "product_Q8_0", "quantise", "run", "serve"):
            assert re.search(rf"^_?armillary_{name}:", assembly, re.MULTILINE)
