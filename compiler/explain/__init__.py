"""What a program does and why, for people: memory by use, cost per call, folded schedules, a page with the graph."""
