"""Prepared directories of made-up documents, without text: the ids are chosen."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from armillary.data.dataset import TokenDataset
from armillary.data.learned import runs_of
from armillary.data.prepared import Facts, Settings, Shard, Split
from armillary.data.shards import ShardWriter
from armillary.files import write_json, write_manifest

END = 2


def made_up(
    directory: Path,
    documents: Sequence[Sequence[int]],
    *,
    masks: Sequence[Sequence[bool]] | None = None,
    shard_documents: int = 3,
    sources: Sequence[int] | None = None,
    source_names: Sequence[str] = ("made up",),
) -> TokenDataset:
    """Write documents, given as ids below 61, in shards of a few, and open them.

    With `masks` they are chats, of which those tokens are learned. `sources` says how many of them
    are of each source.
    """
    settings = Settings(
        sources=[str(number) for number in range(len(sources))] if sources else [*source_names],
        field="text",
        format="auto",
        seed=0,
        validation=0.0,
        part_bytes=1024,
        shard_tokens=1,
        tokenizer_sha256="",
        chat_template_sha256=None if masks is None else "",
        end_id=END,
    )
    shards = []
    for index, first in enumerate(range(0, len(documents), shard_documents)):
        writer = ShardWriter(
            directory / "train", index, np.dtype(np.uint8), masked=masks is not None
        )
        for number, ids in enumerate(documents[first : first + shard_documents], first):
            runs = None if masks is None else runs_of(masks[number])
            writer.append(np.array(ids, dtype=np.uint8), runs)
            writer.end_document()
        writer.close()
        shards.append(Shard(index=index, documents=writer.documents, tokens=writer.tokens))
    count = sum(map(len, documents))
    facts = Facts(
        settings=settings,
        vocab_size=61,
        dtype="uint8",
        source_files=1,
        source_bytes=count,
        splits={
            "train": Split(
                documents=len(documents),
                tokens=count,
                bytes=count,
                learned=None if masks is None else sum(map(sum, masks)),
                sources=None if sources is None else [*sources],
                shards=shards,
            )
        },
        lengths={},
        skipped={},
    )
    write_json(directory / "dataset.json", facts.model_dump())
    write_manifest(directory)
    return TokenDataset(directory)
