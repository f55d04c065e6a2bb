"""The places where worker processes run: this machine, or hosts whose agents joined the group."""
