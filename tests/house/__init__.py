"""Measures of the source: files of a change, lengths of paths, and duplicate names."""
