"""The system layer: files, processes, signals, the Hub."""
