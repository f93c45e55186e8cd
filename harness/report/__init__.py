"""How comparisons are shown: text tables, the HTML page, and markdown for the project's own pages."""
