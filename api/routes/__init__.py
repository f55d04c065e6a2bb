"""The endpoints by subject; PROTOCOL.md section 1 is the table they follow."""
