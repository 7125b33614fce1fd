"""The stages of a step, in order: draft, prune, verify, accept, commit. `sampling` picks target tokens."""
