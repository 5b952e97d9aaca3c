"""Measurements of the program itself, for `pipeline bench`: fixed work, medians, what was measured said beside."""
