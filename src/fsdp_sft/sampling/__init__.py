"""Resumable orders of rows and packs, of one data set or several, for any number of ranks."""
