"""Studies: tables of runs."""
