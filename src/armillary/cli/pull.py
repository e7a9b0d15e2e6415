"""`armillary pull`: have a model on this machine."""

from armillary.cli._options import Debug, Json, Model, print_json
from armillary.wording import bytes_text


def pull(model: Model, json: Json = False, debug: Debug = False) -> None:
    """Fetch a model, or find it where it already lies, and say where.

    Examples:
      armillary pull smollm2-135m
      armillary pull owner/name
      armillary pull owner/name@revision --json

    An interrupted pull goes on from where it was when it is run again.
    """
    from armillary.checkpoints.locate import locate
    from armillary.cli._progress import TransferProgress
    from armillary.files import sha256 as sha256_of

    with TransferProgress() as progress:
        path = locate(model, progress=progress.report)
    files = [path] if path.is_file() else sorted(p for p in path.iterdir() if p.is_file())
    rows = [
        {"file": file.name, "bytes": file.stat().st_size, "sha256": sha256_of(file)}
        for file in files
    ]
    total = sum(file.stat().st_size for file in files)
    if json:
        print_json({"model": model, "path": str(path), "bytes": total, "files": rows})
        return
    print(path)
    for file, row in zip(files, rows, strict=True):
        size = bytes_text(file.stat().st_size)
        print(f"  {file.name}  {size}  sha256 {row['sha256']}")
