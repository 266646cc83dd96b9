"""A finished run at work."""
