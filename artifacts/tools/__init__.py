"""What one does with artifacts: inspect, verify, compare, migrate, upgrade, relabel, synthesize, download."""
