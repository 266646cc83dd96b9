"""Pretraining data: text -> token ids on disk -> masked pairs."""
