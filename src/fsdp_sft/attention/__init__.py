"""Attention and recurrences of packed rows, and attention of rows that several ranks share."""
