"""Faults planted in a copy of the tree, to show that the tests see them."""
