"""Speed and memory beside plain transformers: `python -m tests.tools.bench`, `make bench`, `make gpu`."""
