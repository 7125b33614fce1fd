"""The step, in this order: draft, prune, verify, accept, commit; sampling decides what the target says."""
