"""How a run is spread over processes, and whether its sizes divide. Knows no torch."""

from dataclasses import dataclass
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from armillary.config import DecoderConfig
from armillary.errors import ConfigError

_Count = Annotated[int, Field(ge=1)]


class ParallelConfig(BaseModel):
    """How many processes of each kind; together replicate × shard × context × tensor."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    shard: int = Field(
        -1,
        description="processes that share one copy of weights, gradients and optimiser state, each "
        "with rows of its own (FSDP2); -1 takes all that the other sizes leave",
    )
    replicate: _Count = Field(
        1,
        description="copies of such a group, which exchange gradients only (hybrid sharding): one "
        "for each machine where the network between machines is slow",
    )
    tensor: _Count = Field(
        1,
        description="processes that share each matrix product by heads and channels; only where "
        "the links between them are fast",
    )
    context: _Count = Field(
        1,
        description="processes that share each sequence, for lengths that one cannot hold",
    )

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.shard < 1 and self.shard != -1:
            raise ValueError(f"shard is {self.shard}; give 1 or more, or -1 for all that remain")
        return self


@dataclass(frozen=True)
class Sizes:
    """The processes of each kind, none left open; tensor peers are neighbours, then context's."""

    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1

    @property
    def world(self) -> int:
        """All processes."""
        return self.replicate * self.shard * self.context * self.tensor

    @property
    def data(self) -> int:
        """Processes, or groups of them, that take rows of their own."""
        return self.replicate * self.shard


def check_parallel(
    config: ParallelConfig,
    decoder: DecoderConfig,
    *,
    world: int,
    length: int,
    batch_size: int,
    micro_batch: int,
) -> Sizes:
    """The sizes, with -1 resolved, after everything that must divide was held against them.

    world        processes that were started
    length       tokens of a row, T
    batch_size   rows of a step, over all processes and micro-batches
    micro_batch  rows that a process takes at once
    Raises ConfigError naming the setting and both numbers.
    """
    sizes = _resolve(config, world)
    if sizes.tensor > 1:
        _check_tensor(decoder, sizes.tensor)
    if sizes.context > 1 and length % (2 * sizes.context):
        raise ConfigError(
            f"parallel.context is {sizes.context}, so rows are cut into {2 * sizes.context} equal "
            f"parts, but a row has {length} tokens; make the length a multiple of "
            f"{2 * sizes.context}"
        )
    at_once = sizes.data * micro_batch
    if batch_size % at_once:
        spread = (
            f": {sizes.data} data ranks (replicate {sizes.replicate} × shard {sizes.shard}) with "
            f"{micro_batch} rows each"
        )
        raise ConfigError(
            f"{batch_size} rows a step do not divide by the {at_once} taken at once"
            f"{spread if sizes.data > 1 else ''}; make the rows a multiple of {at_once}"
        )
    return sizes


def shares_vocabulary(decoder: DecoderConfig, tensor: int) -> bool:
    """Whether the rows of embedding and head are shared out: where the vocabulary divides.

    Where it does not, all have all of it. A checkpoint's is not to be chosen, so it is not refused.
    """
    return tensor > 1 and decoder.vocab_size % tensor == 0


def _resolve(config: ParallelConfig, world: int) -> Sizes:
    others = config.replicate * config.context * config.tensor
    told = f"replicate {config.replicate} × context {config.context} × tensor {config.tensor}"
    if config.shard == -1:
        if world % others:
            raise ConfigError(
                f"parallel: {world} processes do not divide by {told} = {others}; start a "
                f"multiple of {others}"
            )
        return Sizes(config.replicate, world // others, config.context, config.tensor)
    if config.shard * others != world:
        raise ConfigError(
            f"parallel: {told} × shard {config.shard} = {config.shard * others}, but {world} "
            f"processes were started; start {config.shard * others} (torchrun "
            f"--nproc-per-node={config.shard * others} on one machine), or set shard to -1"
        )
    return Sizes(config.replicate, config.shard, config.context, config.tensor)


def _check_tensor(decoder: DecoderConfig, tensor: int) -> None:
    """Heads and channels are dealt out whole and in equal numbers."""
    for number, layer in enumerate(decoder.layers):
        if layer.feedforward.fused:
            raise ConfigError(
                f"parallel.tensor is {tensor}, but layer {number} has gate and up fused in one "
                "matrix, which cannot be split so that each process has both; set fused: false"
            )
        if layer.attention.qk_norm_over != "head":
            raise ConfigError(
                f"parallel.tensor is {tensor}, but layer {number} normalises queries and keys over "
                f"{layer.attention.qk_norm_over}, and a process sees its own heads only; set "
                "tensor to 1 (shard takes its place)"
            )
        counts = {
            "n_heads": layer.attention.n_heads,
            "n_kv_heads": layer.attention.n_kv_heads,
            "d_ff": layer.feedforward.d_ff,
        }
        for name, count in counts.items():
            if count % tensor:
                raise ConfigError(
                    f"parallel.tensor is {tensor}, but layer {number} has {name} {count}, which "
                    f"it does not divide; take a divisor of {count}"
                )
