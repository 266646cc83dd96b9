"""Measure what is learned from small tables: `preset = "auto"`, simple ways and other programs.

    python -m tests.tools.defaults DATA MODEL OUT [WAY or name of data …]
    python -m tests.tools.defaults DATA MODEL OUT --choices or --table

DATA has the folders glue/, ner/wnut17/ and squad/; MODEL is a small BERT. Each run is the command that a user types, on
a table of some rows that are drawn by a seed, scored on at most 1,000 rows of dev. OUT keeps the prediction tables, the
scores, the recipe and the log of each run; a run that has its scores is not repeated, and several processes can share
the work, with OMP_NUM_THREADS=1 one for each core. SETFIT_PYTHON names the interpreter of an environment that has
setfit and python-crfsuite.

`--choices` prints what defaults are chosen by, on the rows of dev with odd keys, and `--table` writes the tables of
recipes/defaults.md from those with even keys, and recipes/defaults.jsonl.
"""
