"""A plan's frequencies as a picture in a file, SVG or PNG.

matplotlib draws both, so that they are the same picture, its font inside. (`charts` draws for a
page, which gives colours and font.) It is an extra: `pip install armillary[figures]`.
"""

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from armillary.errors import UserError
from armillary.files import write_atomically

if TYPE_CHECKING:
    from armillary.extension.plan import ExtensionPlan, GroupChange, RulePlan

# Okabe and Ito's palette; lines differ in their dashes too.
_BEFORE, _AFTER, _GROUND = "#555555", "#0072b2", "#888888"
_OTHERS = ("#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
_DASHES = ((4, 2), (1, 1.5), (5, 1, 1, 1), (3, 1, 1, 1, 1, 1), (8, 2), (2, 2))


def draw_frequencies(planned: "ExtensionPlan", path: Path) -> None:
    """Draw the wavelength of each channel pair before and after, for the recommended rule.

    The other rules of the plan are thin lines. Of layers that rotate in different ways those are
    drawn of which there are most.
    Raises UserError for another ending than .svg or .png, a plan without a rule to draw, and when
    matplotlib is not installed.
    """
    kind = path.suffix.lower().removeprefix(".")
    if kind not in {"svg", "png"}:
        raise UserError(f"{path}: a figure's name ends in .svg or .png")
    possible = [each for each in planned.rules if each.changes]
    shown = planned.recommended or next(iter(possible), None)
    if shown is None or not shown.changes:
        raise UserError(f"{path}: there is nothing to draw; {planned.why}")
    figure = _figure(planned, shown, [each for each in possible if each is not shown])
    buffer = io.BytesIO()
    # Without the date and with fixed ids, equal plans give equal files.
    figure.savefig(buffer, format=kind, dpi=160, metadata={"Date": None} if kind == "svg" else None)
    with write_atomically(path) as file:
        file.write(buffer.getvalue())


def title_of(planned: "ExtensionPlan", shown: "RulePlan") -> str:
    """The message of the picture."""
    change = _most(shown).change
    pairs = len(change.before)
    unseen = int(change.unseen.sum())
    name = "Without a rule" if shown.rule is None else shown.name
    if unseen:
        return (
            f"{name}: {unseen} of {pairs} pairs meet angles in {planned.target:,} positions "
            f"that {planned.window:,} never showed"
        )
    return f"{name}: no pair meets an angle in {planned.target:,} positions that is new to it"


def _most(each: "RulePlan") -> "GroupChange":
    return max(each.changes, key=lambda part: len(part.group.layers))


def _figure(planned: "ExtensionPlan", shown: "RulePlan", others: "list[RulePlan]") -> Any:
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError(
            "--figure needs matplotlib; install it with: pip install 'armillary[figures]'"
        ) from error
    matplotlib.rcParams["svg.hashsalt"] = "armillary"
    figure = Figure(figsize=(8, 4.8), layout="constrained")
    axes = figure.add_subplot()
    change = _most(shown).change
    number = range(len(change.before))
    for i, other in enumerate(others):
        axes.plot(
            number,
            _most(other).change.new_wavelengths,
            color=_OTHERS[i % len(_OTHERS)],
            dashes=_DASHES[i % len(_DASHES)],
            linewidth=1,
            label=_label(other),
        )
    axes.plot(number, change.wavelengths, color=_BEFORE, marker=".", label="as trained")
    if shown.rule is not None:
        axes.plot(number, change.new_wavelengths, color=_AFTER, linewidth=2.5, label=_label(shown))
    for window, name in ((planned.window, "window"), (planned.target, "target")):
        axes.axhline(window, color=_GROUND, linewidth=0.8, linestyle=":")
        axes.annotate(
            f"{name} {window:,}",
            (0, window),
            xytext=(0, 3),
            textcoords="offset points",
            color=_GROUND,
        )
    axes.set_yscale("log")
    axes.set_xlabel("channel pair")
    axes.set_ylabel("wavelength, positions")
    axes.set_title(title_of(planned, shown), fontsize=11, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    return figure


def _label(each: "RulePlan") -> str:
    factor = getattr(each.rule, "factor", None)
    name = each.name if each.over is None else f"{each.name}, {each.over}"
    return name if factor is None else f"{name}, factor {factor:g}"
