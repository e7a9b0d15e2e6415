"""tokenizer.json and the files beside it → a definition.

Source: the files that transformers and the tokenizers library write.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from armillary.errors import CheckpointError
from armillary.files import read_json, read_json_if_there
from armillary.tokenizer.definition import Definition, check, is_marker, pieces

_LIMIT = 256 << 20  # bytes of a tokenizer.json; the largest vocabularies in use take about 35 MB
_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


def read(path: Path, config: Mapping[str, object] | None) -> Definition:
    """Read `path`, with `config` in place of the tokenizer_config.json beside it.

    Raises CheckpointError naming the file and what is wrong in it.
    """
    directory = path.parent
    if not path.is_file():
        raise CheckpointError(_absent(path))
    model = read_json(path, _LIMIT)
    check(model, str(path))
    config = (
        read_json_if_there(directory / "tokenizer_config.json") if config is None else dict(config)
    )
    where = str(directory / "tokenizer_config.json")
    _add_listed_tokens(model, config, where)
    names = _names(read_json_if_there(directory / "special_tokens_map.json") | config)
    _mark_controls(model, names)
    ids = {text: index for index, text in pieces(model).items()}
    for name, text in names.items():
        if text not in ids:
            raise CheckpointError(f"{where}: {name} {text!r} is not in the vocabulary of {path}")
    said = config.get("add_bos_token")
    return Definition(
        model=model,
        names=names,
        eos_ids=_eos_ids(config, names, ids, where),
        prefix=_processors_prefix(model.get("post_processor"), str(path))
        if said is None
        else _said_prefix(said, names, ids, where),
        chat_templates=_chat_templates(directory, config, where),
        where=str(path),
    )


def _absent(path: Path) -> str:
    if (path.parent / "tokenizer.model").is_file():
        return (
            f"{path}: is not there, only the older tokenizer.model; save the tokenizer again with "
            "transformers (save_pretrained), which writes a tokenizer.json"
        )
    return f"{path}: is not there; fetch it beside the weights"


def _text(entry: object) -> str | None:
    """The text of a token that is written as a string or as an added token's entry."""
    if isinstance(entry, Mapping):
        entry = entry.get("content")
    return entry if isinstance(entry, str) and entry else None


def _names(config: Mapping[str, object]) -> dict[str, str]:
    found = {name: _text(config.get(name)) for name in _NAMES}
    return {name: text for name, text in found.items() if text is not None}


def _add_listed_tokens(model: dict[str, Any], config: Mapping[str, object], where: str) -> None:
    """Add the tokens that tokenizer_config.json lists and tokenizer.json has not."""
    listed = config.get("added_tokens_decoder")
    if not isinstance(listed, Mapping):
        return
    known = {token["id"] for token in model["added_tokens"]}
    for key, entry in listed.items():
        if not key.isdecimal() or not isinstance(entry, Mapping) or _text(entry) is None:
            raise CheckpointError(f"{where}: added_tokens_decoder: {key!r} is no token's entry")
        if int(key) not in known:
            model["added_tokens"].append({**entry, "id": int(key)})


def _mark_controls(model: dict[str, Any], names: Mapping[str, str]) -> None:
    for token in model["added_tokens"]:
        if is_marker(token["content"]) or token["content"] in names.values():
            token["special"] = True


def _eos_ids(
    config: Mapping[str, object], names: Mapping[str, str], ids: Mapping[str, int], where: str
) -> tuple[int, ...]:
    texts = config.get("eos_tokens")  # our own key: Hugging Face's files name one here
    if texts is None:
        return (ids[names["eos_token"]],) if "eos_token" in names else ()
    if not isinstance(texts, list) or not all(text in ids for text in texts):
        raise CheckpointError(f"{where}: eos_tokens must be a list of tokens' texts")
    return tuple(ids[text] for text in texts)


def _said_prefix(
    said: object, names: Mapping[str, str], ids: Mapping[str, int], where: str
) -> tuple[int, ...]:
    """The ids before a raw text by add_bos_token, which overrides the post-processor."""
    if not isinstance(said, bool):
        raise CheckpointError(f"{where}: add_bos_token must be true or false, not {said!r}")
    if said and "bos_token" not in names:
        raise CheckpointError(f"{where}: add_bos_token is true, but there is no bos_token")
    return (ids[names["bos_token"]],) if said else ()


def _processors_prefix(processor: object, where: str) -> tuple[int, ...]:
    try:
        return tuple(_template_prefix(processor, where))
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{where}: post_processor is not well formed") from error


def _template_prefix(processor: object, where: str) -> Iterator[int]:
    if not isinstance(processor, Mapping) or processor.get("type") == "ByteLevel":
        return
    kind = processor.get("type")
    if kind == "Sequence":
        for part in processor.get("processors", ()):
            yield from _template_prefix(part, where)
    elif kind == "TemplateProcessing":
        for piece in processor.get("single", ()):
            if "SpecialToken" not in piece:
                return
            yield from processor["special_tokens"][piece["SpecialToken"]["id"]]["ids"]
    else:
        raise CheckpointError(
            f"{where}: post_processor {kind!r} is not supported; say add_bos_token in "
            "tokenizer_config.json instead"
        )


def _chat_templates(directory: Path, config: Mapping[str, object], where: str) -> dict[str, str]:
    """Templates by name: those in files of their own, else those in tokenizer_config.json."""
    files = {
        path.stem: path for path in sorted(directory.glob("additional_chat_templates/*.jinja"))
    }
    if (directory / "chat_template.jinja").is_file():
        files["default"] = directory / "chat_template.jinja"
    if files:
        return {name: _read_text(path) for name, path in files.items()}
    template = config.get("chat_template")
    if template is None:
        return {}
    if isinstance(template, str):
        return {"default": template}
    templates: dict[str, str] = {}
    for entry in template if isinstance(template, list) else [template]:
        name = entry.get("name") if isinstance(entry, Mapping) else None
        text = entry.get("template") if isinstance(entry, Mapping) else None
        if not isinstance(name, str) or not isinstance(text, str):
            raise CheckpointError(
                f"{where}: chat_template must be a string, or a list of names and templates"
            )
        templates[name] = text
    return templates


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: cannot be read as UTF-8 text: {error}") from error
