"""Measurements by our own bench: synthetic weights on the device, decode and prefill timing, records."""
