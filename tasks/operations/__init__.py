"""One module per Tinker operation, under its wire name: from a pending request to its outcome."""
