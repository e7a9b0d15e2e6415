"""Looks at a page in headless Chromium: what sticks out, what overlaps, which colours it has.

The page itself runs no script. It stands in frames of several widths on a page of the test's, whose
script measures it and leaves what it found as JSON.
"""

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")


def chromium() -> str | None:
    """Return the program, where there is one."""
    return next(filter(None, map(shutil.which, NAMES)), None)


def look_at(page: Path, widths: tuple[int, ...], dark: bool, scratch: Path) -> dict[int, Any]:
    """Load a page once, in a frame of each width; return what was found by width."""
    frames = "".join(
        f'<iframe src="{page.as_uri()}" width="{width}" height="900" frameborder="0"></iframe>'
        for width in widths
    )
    scratch.mkdir()
    (scratch / "frames.html").write_text(
        f"<!doctype html><body>{frames}<pre id=found></pre><script>{_SCRIPT}</script>", "utf-8"
    )
    done = subprocess.run(
        [
            str(chromium()),
            *(
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--hide-scrollbars",
            ),
            *("--allow-file-access-from-files", f"--user-data-dir={scratch / 'profile'}"),
            # Chromium's own numbers: 0 is dark, 1 is light.
            f"--blink-settings=preferredColorScheme={0 if dark else 1}",
            *("--virtual-time-budget=20000", "--dump-dom", (scratch / "frames.html").as_uri()),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    found = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.S)
    assert found is not None, done.stderr[-2000:]
    return {int(width): facts for width, facts in json.loads(unescape(found[1])).items()}


_SCRIPT = """
function words(element) { return element.textContent.trim().slice(0, 60); }
function apart(a, b) {
  return a.right < b.left + 1 || b.right < a.left + 1 ||
    a.bottom < b.top + 3 || b.bottom < a.top + 3;
}
function look(frame) {
  const page = frame.contentDocument, root = page.documentElement;
  page.querySelectorAll('details').forEach(each => each.open = true);
  const found = { scroll: root.scrollWidth, cut: [], overlapping: [], outside: [], colours: [],
    heights: [] };
  for (const svg of page.querySelectorAll('svg.chart')) {
    const box = svg.getBoundingClientRect();
    const texts = [...svg.querySelectorAll('text')];
    const boxes = texts.map(each => each.getBoundingClientRect());
    boxes.forEach(each => found.heights.push(each.height));
    boxes.forEach((each, i) => {
      if (each.left < box.left - 1 || each.right > box.right + 1 || each.bottom > box.bottom + 1)
        found.cut.push(words(texts[i]));
      for (let k = 0; k < i; k++)
        if (!apart(each, boxes[k])) found.overlapping.push([words(texts[k]), words(texts[i])]);
    });
  }
  const edge = root.clientWidth + 1;
  for (const each of page.querySelectorAll('body *'))
    if (!each.closest('.scroll *, svg') && each.getBoundingClientRect().right > edge)
      found.outside.push(each.tagName + ' ' + words(each));
  const colour = element => page.defaultView.getComputedStyle(element);
  found.ground = colour(page.body).backgroundColor;
  for (const [selector, property] of [['h1', 'color'], ['.soft', 'color'], ['td', 'color'],
      ['figcaption', 'color'], ['.chart text', 'fill'], ['a', 'color'], ['summary', 'color']])
    for (const each of page.querySelectorAll(selector))
      if (!each.classList.contains('over')) found.colours.push([selector, colour(each)[property]]);
  for (const each of page.querySelectorAll('.measured'))
    found.colours.push(['.measured', colour(each).stroke]);
  found.cells = [...page.querySelectorAll('.chart .cell:not(.gap)')].map(each =>
    [colour(each).fill, colour(each.nextElementSibling).fill]);
  found.scrolled = [...page.querySelectorAll('.scroll')].map(each =>
    [each.clientWidth, each.scrollWidth, colour(each).overflowX]);
  return found;
}
addEventListener('load', () => {
  const found = {};
  for (const frame of document.querySelectorAll('iframe')) found[frame.width] = look(frame);
  for (const facts of Object.values(found))
    facts.colours = [...new Set(facts.colours.map(JSON.stringify))].map(JSON.parse);
  document.getElementById('found').textContent = JSON.stringify(found);
});
"""
