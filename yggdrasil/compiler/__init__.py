"""The menu of shapes, and how a forward becomes one static graph for each of them."""
