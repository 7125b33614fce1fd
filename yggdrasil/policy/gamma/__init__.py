"""Speculative lengths of batched serving: one policy per module, looked up by name in `registry`."""
