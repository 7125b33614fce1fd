"""Reports for people: a run in numbers, tables, plots, the timeline of a step."""
