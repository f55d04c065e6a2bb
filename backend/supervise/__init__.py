"""Child processes of ours: how they start, show that they live, end, and start again."""
