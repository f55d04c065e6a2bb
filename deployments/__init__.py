"""How the service is run: the `tinkerflow` command, the stack of processes behind `up`, the quickstart, the doctor."""
