"""Serving many requests at once: pages of KV, a batcher, the thread that runs it, and HTTP."""
