"""Tasks: what is done. `operations` has a module per Tinker operation, `execution` what executes them.

`pipelines` has the steps of the fine-tuning pipelines. Nothing in the first two knows Prefect.
"""
