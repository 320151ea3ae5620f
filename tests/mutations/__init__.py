"""Defects planted in the sources, one at a time, and the tests that have to notice them."""
