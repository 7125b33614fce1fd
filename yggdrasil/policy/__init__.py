"""Decisions: measured latencies, calibrated acceptance, the objective, and the shape of the next step."""
