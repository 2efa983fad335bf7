"""Rows that ranks share: how exact, beside what others do, what it stores and what it sends."""
