"""Texts and tokens: pure functions over strings, lists and arrays, and the only readers of files."""
