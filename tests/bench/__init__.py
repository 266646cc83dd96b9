"""Speed and memory of this package beside plain transformers: `python -m tests.bench`, `make bench`, `make gpu`."""
