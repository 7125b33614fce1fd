"""Many requests at once: pages of KV, rows around the same step, a thread that runs them, and HTTP in
front.
"""
