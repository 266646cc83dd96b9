"""Tools that measure and generate: goldens, pages, defaults, benchmarks, transformers' own tests."""
