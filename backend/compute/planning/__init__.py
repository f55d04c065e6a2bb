"""The memory plan of a worker group, and the highest speed that the peak rates of its devices allow."""
