"""The work itself: a module for each Tinker operation in `operations`, and its execution in `execution`.

`pipelines` has the steps of the fine-tuning pipelines. The other two folders do not depend on Prefect.
"""
