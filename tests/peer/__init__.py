"""The model in transformers' own tests of models, beside transformers' BERT; `python -m tests.peer` runs them."""
