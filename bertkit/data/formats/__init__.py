"""The only readers of files and of data sets on the Hub."""
