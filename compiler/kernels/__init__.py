"""Kernel families: for each template, which instantiation serves a shape and how it is launched."""
