"""Shows comparisons with the paper: text tables, the HTML page, and markdown for the project's pages."""
