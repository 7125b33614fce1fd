"""Speculative lengths of batched serving: the seam in `protocol`, one policy a module, all of them by name
in `catalog`.
"""
