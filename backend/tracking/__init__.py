"""Runs in the trackers that people use: wandb, mlflow, trackio and tensorboard. Nothing waits for a tracker.

At its start, a writer reads which values its tracker has stored, and then writes only the others (mirror.py). Each
value is therefore written once, even after a crash. `trackers/` contains a file for each tracker. journal_runs.py
mirrors the journal's runs.
"""
