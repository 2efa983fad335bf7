"""The order of rows: one data set or several, one row or packs of them, resumable on any number of ranks."""
