"""Text -> token ids on disk -> masked pairs."""
