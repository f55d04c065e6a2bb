"""The work itself: `operations` contains a module for each Tinker operation, and `execution` executes them.

`pipelines` contains the steps of the fine-tuning pipelines. The other two folders do not depend on Prefect.
"""
