"""The machine: files, processes, signals, the Hub."""
