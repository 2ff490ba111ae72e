"""Passes for the files of some targets, as their profiles ask."""
