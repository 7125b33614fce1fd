"""The menu of shapes, and the lowering of a forward to one static graph per shape."""
