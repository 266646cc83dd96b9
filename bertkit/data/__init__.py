"""Pure functions from strings, lists and arrays to arrays: no model, no Trainer."""
