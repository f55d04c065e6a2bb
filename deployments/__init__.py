"""Running the service: the `tinkerflow` command, the stack of processes behind `up`, the quickstart, the doctor."""
