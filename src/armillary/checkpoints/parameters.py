"""The parameters that a decoder has, and the tensors of a file that fill them.

Every tensor of the file is assigned once and every parameter filled, or it is an error.
"""

from collections.abc import Iterator, Mapping, Sequence

from armillary.checkpoints.tensors import StoredTensor, TensorToWrite
from armillary.config import AttentionConfig, DecoderConfig, FeedForwardConfig, NormConfig
from armillary.errors import CheckpointError
from armillary.strict_dict import nearest

Shape = tuple[int, ...]
_LISTED = 3


def parameter_shapes(config: DecoderConfig) -> dict[str, Shape]:
    """Name and shape of each parameter, in the order of the computation."""
    d = config.d_model
    shapes: dict[str, Shape] = {"embedding.weight": (config.vocab_size, d)}
    if config.position_table == "learned":
        shapes["position_table.weight"] = (config.max_positions, d)
    for i, layer in enumerate(config.layers):
        shared = layer.residual == "parallel_shared_norm"
        reads = (
            [] if layer.norm_placement == "post" else ["norm1"] if shared else ["norm1", "norm2"]
        )
        gives = [] if layer.norm_placement == "pre" else ["post_norm1", "post_norm2"]
        parts: list[tuple[str, Shape]] = []
        for name in (*reads, *gives):
            parts += _norm(name, d, layer.norm)
        parts += _attention(layer.attention, d)
        parts += _feedforward(layer.feedforward, d)
        shapes.update({f"layers.{i}.{name}": shape for name, shape in parts})
    if config.final_norm is not None:
        shapes.update(_norm("final_norm", d, config.final_norm))
    if not config.tie_head:
        shapes["head.weight"] = (config.vocab_size, d)
    if config.head_bias:
        shapes["head.bias"] = (config.vocab_size,)
    return shapes


def _attention(config: AttentionConfig, d: int) -> Iterator[tuple[str, Shape]]:
    width, kv_width = config.n_heads * config.d_head, config.n_kv_heads * config.d_head
    for name, rows in (("q", width), ("k", kv_width), ("v", kv_width)):
        yield from _linear(f"attention.{name}", rows, d, config.qkv_bias)
    yield from _linear("attention.out", d, width, config.out_bias)
    if config.qk_norm is not None:
        for name, heads in (("q_norm", config.n_heads), ("k_norm", config.n_kv_heads)):
            yield from _norm(f"attention.{name}", config.qk_norm_width(heads), config.qk_norm)


def _feedforward(config: FeedForwardConfig, d: int) -> Iterator[tuple[str, Shape]]:
    if config.fused:
        yield from _linear("feedforward.gate_up", 2 * config.d_ff, d, config.bias)
    else:
        if config.kind == "glu":
            yield from _linear("feedforward.gate", config.d_ff, d, config.bias)
        yield from _linear("feedforward.up", config.d_ff, d, config.bias)
    yield from _linear("feedforward.down", d, config.d_ff, config.bias)


def _linear(name: str, rows: int, columns: int, bias: bool) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (rows, columns)
    if bias:
        yield f"{name}.bias", (rows,)


def _norm(name: str, width: int, config: NormConfig) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (width,)
    if config.bias:
        yield f"{name}.bias", (width,)


def check_parameters(config: DecoderConfig, tensors: Sequence[TensorToWrite]) -> None:
    """Raise ValueError unless the tensors are the configuration's parameters, once each."""
    shapes = parameter_shapes(config)
    given = [tensor.name for tensor in tensors]
    if sorted(given) != sorted(shapes):
        differing = sorted(set(given) ^ set(shapes)) or [n for n in given if given.count(n) > 1]
        raise ValueError(f"tensors to write must be the parameters, once each; not: {differing[0]}")
    for tensor in tensors:
        if tuple(tensor.shape) != shapes[tensor.name]:
            raise ValueError(f"{tensor.name}: shape {tensor.shape}, {shapes[tensor.name]} needed")


def check_filled(
    shapes: Mapping[str, Shape],
    tensors: Mapping[str, StoredTensor],
    *,
    allow_missing: bool = False,
) -> None:
    """Raise CheckpointError unless each parameter has a tensor of its shape, and none is over."""
    missing = [name for name in shapes if name not in tensors]
    if missing and not allow_missing:
        more = f" and {len(missing) - _LISTED} more" if len(missing) > _LISTED else ""
        raise CheckpointError(
            f"{len(missing)} of {len(shapes)} parameters have no tensor: "
            f"{', '.join(missing[:_LISTED])}{more}; "
            "complete the checkpoint, or load what is there with allow_missing=True"
        )
    for name, tensor in tensors.items():
        if name not in shapes:
            raise CheckpointError(
                f"{tensor.where}: tensor {tensor.name} fills {name}, which this configuration "
                f"does not have{nearest(name, shapes)}"
            )
        if tensor.shape != shapes[name]:
            raise CheckpointError(
                f"{tensor.where}: tensor {tensor.name} has shape {tensor.shape}, but the "
                f"configuration needs {shapes[name]} for {name}"
            )


def template_of(name: str) -> str:
    """`layers.3.norm1.weight` → `layers.{i}.norm1.weight`; names outside layers as they are."""
    parts = name.split(".")
    return ".".join(["layers", "{i}", *parts[2:]]) if parts[0] == "layers" else name


def assign(
    config: DecoderConfig,
    found: Mapping[str, StoredTensor],
    where: str,
    allow_missing: bool = False,
) -> dict[str, StoredTensor]:
    """The tensors of a file that has them by our names; raises as `check_fitting` does."""
    shapes = parameter_shapes(config)
    check_fitting(shapes, found, where, allow_missing)
    return {name: found[name] for name in shapes if name in found}


def check_fitting(
    expected: Mapping[str, Shape],
    found: Mapping[str, StoredTensor],
    where: str,
    allow_missing: bool = False,
) -> None:
    """Raise CheckpointError unless a file's tensors are those expected, by its own names.

    When one is missing (unless `allow_missing`), belongs to no parameter, or has another shape; the
    message names them all or the first few.
    """
    missing = [name for name in expected if name not in found]
    extra = [name for name in found if name not in expected]
    faults = []
    if missing and not allow_missing:
        faults.append("missing " + _some(missing, extra))
    if extra:
        faults.append("belonging to no parameter " + _some(extra, missing or list(expected)))
    if faults:
        raise CheckpointError(f"{where}: tensors do not fit the decoder: {'; '.join(faults)}")
    for name, shape in expected.items():
        if name in found and found[name].shape != shape:
            raise CheckpointError(
                f"{found[name].where}: tensor {name!r} has shape {list(found[name].shape)}, "
                f"the configuration asks for {list(shape)}"
            )


def _some(names: list[str], candidates: list[str]) -> str:
    listed = [f"{name!r:.120}{nearest(name, candidates)}" for name in names[:_LISTED]]
    more = len(names) - len(listed)
    return ", ".join(listed) + (f" and {more} more" if more else "")
