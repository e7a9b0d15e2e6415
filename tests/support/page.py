"""Reads a page strictly, and has a text that tries to be more than text."""

import re
from html.parser import HTMLParser

VOID = {"meta", "br", "hr", "img", "link", "input"}
HOSTILE = "</pre><script>alert(1)</script>{{ 7*7 }}<img src=x onerror=a>&amp;\x1b[2J\ud800\u202e"


class Page(HTMLParser):
    """A page read strictly: every element is closed where it should be."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.attributes, self.words = [], [], [], []
        self.figures, self.rows = [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)
        if tag == "figcaption":
            self.figures.append("")
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" in self.open:
            return
        self.words.append(data)
        if "figcaption" in self.open:
            self.figures[-1] += data
        if "td" in self.open or "th" in self.open:
            self.rows[-1][-1] += data

    @property
    def text(self):
        return re.sub(r"[\s\xa0]+", " ", " ".join(self.words))
