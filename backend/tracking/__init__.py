"""Runs in the trackers that people use: wandb, mlflow, trackio and tensorboard. Nothing waits for a tracker.

A writer first reads the values that its tracker has stored, and then writes only missing values (mirror.py). So each
value is written once, even after a crash. Each tracker has a file in `trackers/`. journal_runs.py mirrors the journal's
runs.
"""
