"""The kernels: one file for each kind, and here the list of all that are compiled.

To add one, write a function whose parameters are those of `engine/kernel.py`, list what it makes in
`all_kernels`, and let a step of `engine/plan.py` put it into programs. To make one faster on a
machine, ask `Machine` where its steps are emitted.
"""

from armillary.engine.cache_formats import CACHE_FORMATS
from armillary.engine.formats import FORMATS
from armillary.engine.kernel import Kernel
from armillary.engine.kernels import (
    activation,
    attention,
    block_attention,
    embedding,
    experts,
    heads,
    matmul,
    norm,
    product,
    quantise,
    rotary,
    rows,
    sampling,
    schedule,
)
from armillary.engine.kernels.elementary import ACTIVATIONS
from armillary.engine.machine import Machine


def all_kernels(machine: Machine) -> list[Kernel]:
    """Every kernel, for a machine."""
    tiled = [form for form in FORMATS.values() if form.activations == "float32"]
    return [
        schedule.run(machine),
        schedule.serve(machine),
        schedule.launch(),
        *(product.product(form, machine) for form in FORMATS.values()),
        *(product.experts_product(form, machine) for form in FORMATS.values()),
        *(matmul.matmul(form, machine) for form in tiled),
        *(matmul.experts_matmul(form, machine) for form in tiled),
        matmul.narrow(machine),
        *(block_attention.block_attention(form, machine) for form in CACHE_FORMATS.values()),
        *(embedding.embedding(form) for form in FORMATS.values()),
        *(activation.activation(name) for name in ACTIVATIONS),
        *(rotary.rotate(layout) for layout in ("half_split", "interleaved")),
        *(attention.queries(form) for form in CACHE_FORMATS.values()),
        *(attention.attention(form) for form in CACHE_FORMATS.values()),
        *(attention.append(form) for form in CACHE_FORMATS.values()),
        attention.combine(),
        *(experts.route(score) for score in ("softmax", "sigmoid")),
        experts.dispatch(),
        experts.mix(),
        heads.by_head(),
        heads.by_row(),
        norm.rms_norm(),
        norm.layer_norm(),
        quantise.quantise(),
        rows.add(),
        rows.pick(),
        rows.scale(),
        rows.soft_cap(),
        sampling.weigh(),
    ]
