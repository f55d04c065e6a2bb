"""Measures of the source: what one change touches, how long a path is, which names stand twice."""
