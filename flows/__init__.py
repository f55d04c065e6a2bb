"""Flows: who runs what, and when. `engine` takes requests from the journal to the pool and answers them.

A model has a runner (its loop over batches), a base model one for samples; `prefect` shows what they do. `pipelines`
are Prefect flows that people schedule.
"""
