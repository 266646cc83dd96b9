"""This package beside other code that does the same, in one process and in turn: seconds, ratios, equal answers.

A bench makes or reads its data, runs both sides on the same input, reports lines to the person who waits and gives the
figures as one plain dict that JSON can hold, with the machine they were measured on, and as tables. How sides take
turns and what their seconds give stands once, in `bertkit.bench.measure`; a bench says what its sides are, what it
counts and what it reports besides.
The other code, the reference, is never part of this package: the user brings a copy (`bertkit.bench.reference`).
"""
