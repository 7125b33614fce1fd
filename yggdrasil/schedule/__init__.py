"""The iteration as stages, the order and place in which they run, the search for the best such plan, and
what runs any of them.
"""
