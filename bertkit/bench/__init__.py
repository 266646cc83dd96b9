"""This package beside other code that does the same, in one process and in turn: seconds, ratios, equal answers.

A bench makes or reads its data, runs both sides on the same input, reports lines to the person who waits and gives the
figures as one plain dict that JSON can hold: `bench`, `machine`, `data`, `rows` with the figures of each case, and
`ratios`, a number for each case: how many times as fast this package is; empty where there is nothing to compare with.
The other code, the reference, is never part of this package: the user brings a copy (`bertkit.bench.reference`).
"""
