"""Passes from the op graph to the linear schedule: fusion, kernel choice, memory plan, schedule."""
