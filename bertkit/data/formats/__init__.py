"""Readers of data files and of data sets on the Hub."""
