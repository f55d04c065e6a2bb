"""`python -m tinkerflow`: the `tinkerflow` command."""

from tinkerflow.deployments.cli import main

if __name__ == "__main__":
    main()
