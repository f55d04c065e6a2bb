"""Where worker processes run: on this machine, or on hosts whose agents joined the group."""
