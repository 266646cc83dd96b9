"""The model in transformers' own tests of models, beside transformers' BERT; `make peer` runs them."""
