"""What people read: a run in numbers, tables, plots, the clock of a step."""
