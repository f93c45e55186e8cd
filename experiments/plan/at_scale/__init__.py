"""The largest grids, on paper: what is planned for them, as a case, a table and a figure."""
