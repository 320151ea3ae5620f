"""Suites and programs of others, and programs written as theirs are."""
