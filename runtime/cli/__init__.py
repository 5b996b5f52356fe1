"""The `ninferc` command line."""
