"""Analysis of runs and studies."""
