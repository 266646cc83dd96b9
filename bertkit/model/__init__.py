"""The network, and what makes it fast."""
