"""Runs in the trackers that people use: wandb, mlflow, trackio and tensorboard. Nothing waits for a tracker.

A writer reads at its start which values its tracker has, and writes only the others (mirror.py). So each value is
written once, also after a crash. `trackers/` has a file for each tracker. journal_runs.py mirrors the journal's runs.
"""

__all__ = ["journal_runs", "mirror", "tracker", "trackers"]
