"""Tables and plots as values, and their renderers, independent of runs."""
