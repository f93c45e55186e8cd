"""How comparisons are shown: text tables, markdown and the HTML page."""
