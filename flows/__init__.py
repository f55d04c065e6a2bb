"""The scheduling of work: `engine` passes requests from the journal to the pool and answers them.

Each model has a runner, which loops over its batches, and each base model has a runner for samples. `prefect` shows
their work. `pipelines` contains Prefect flows that people schedule.
"""
