"""Tables and plots, and their renderers; they know no run."""
