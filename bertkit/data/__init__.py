"""Text and token processing, and the only modules that read data files and data sets on the Hub."""
