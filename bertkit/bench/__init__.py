"""Benchmarks of this package against other code for the same job, alternating in one process.

A benchmark makes or reads its data, runs both sides on the same input, compares their answers and reports lines to the
user. It returns its figures as one plain dict for JSON, with the machine they were measured on, and as tables.
`bertkit.bench.measure` alternates the sides and computes rates and ratios; each benchmark defines its sides, its counts
and its other reports. Reference code is never part of this package: the user brings a copy (`bertkit.bench.reference`).
"""
