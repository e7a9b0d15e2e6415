"""Charts as SVG for a page: text stays text, colours follow the page's, nothing needs a script.

A chart says what is drawn; how that looks is in `STYLE`, which the page includes once. Series
differ in dashes and markers as well as in colour, so that grey print and colour-blind eyes tell
them apart; a series keeps its number, and so its look, in all charts of a page. What is hovered
over is told by `title` elements. A chart's own title belongs to the page, where it can wrap.
"""
