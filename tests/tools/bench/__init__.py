"""Speed and memory compared with plain transformers: `python -m tests.tools.bench`, `make bench`, `make gpu`."""
