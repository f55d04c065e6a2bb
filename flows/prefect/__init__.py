"""Prefect observes: operations start immediately and are mirrored as flow and task runs.

Cancel, Suspend, Resume and Retry act on them. The journal is the truth.
"""
