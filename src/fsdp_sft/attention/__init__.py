"""Attention of packed rows, and of rows that several ranks share."""
