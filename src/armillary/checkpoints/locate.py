"""What a MODEL on the command line, or the argument of `load`, means: a path on this machine.

The one place that turns a name into a file or directory; everything behind it takes paths.
"""

import difflib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from armillary.errors import UserError

if TYPE_CHECKING:
    from armillary.checkpoints.download import Progress


def locate(name: str | Path, *, progress: "Progress | None" = None) -> Path:
    """Return the directory or file that `name` means, fetching it when it is not here.

    `name` is, in this order: a directory or file, whatever is in it; an alias (see `ALIASES`); a
    Hub repository `owner/name`, with `@revision` behind it when another than its main one is meant,
    or `owner/name/file.gguf` where a repository holds several GGUF files.
    `progress(what, done, total)` is called with bytes while something is fetched.
    Raises UserError when there is no such thing or it cannot be had.
    """
    text = os.path.expanduser(name)
    if os.path.isdir(text):
        return Path(text)
    if os.path.isfile(text):
        return Path(text)
    from armillary.checkpoints.packaged import ALIASES, locate_packaged

    if text in ALIASES:
        (path,) = locate_packaged(text, ALIASES[text], cache_directory() / "models", progress)
        return path
    if _may_be_on_the_hub(text):
        from armillary.checkpoints.hub import locate_on_hub

        return locate_on_hub(text, progress)
    raise UserError(_not_found(text))


def cache_directory() -> Path:
    """Return where fetched models lie: $ARMILLARY_CACHE, else armillary in the user's cache."""
    own = os.environ.get("ARMILLARY_CACHE")
    if own:
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "armillary"


def prompt_directory() -> Path:
    """Return where what was computed of long prompts lies."""
    return cache_directory() / "prompts"


def _may_be_on_the_hub(name: str) -> bool:
    """Return whether a name that is no path here has the form of a Hub id."""
    owner, *rest = name.partition("@")[0].split("/")
    if not owner or owner.startswith((".", "~")) or not all(rest):
        return False
    is_file = name.partition("@")[0].endswith(".gguf")
    # owner/name, or owner/name/file.gguf unless that is a slip in a path that begins here.
    return len(rest) == (2 if is_file else 1) and not (is_file and os.path.isdir(owner))


def _not_found(name: str) -> str:
    from armillary.checkpoints.packaged import ALIASES

    if not name:
        return f"no model is named; give an alias ({', '.join(ALIASES)}), a path or a Hub id"
    if "\0" not in name and os.path.lexists(name):
        return f"{name}: is neither a directory nor a file that can be opened"
    if "/" in name or os.sep in name or name.endswith(".gguf"):
        return f"{name}: no such file or directory"
    near = difflib.get_close_matches(name, ALIASES, n=1)
    hint = f'did you mean "{near[0]}"?' if near else f"the aliases are: {', '.join(ALIASES)}"
    return f"{name}: no such alias, directory or .gguf file; {hint}"
