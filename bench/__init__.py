"""Measurements behind every claim: one script per claim over one harness. See README.md."""
