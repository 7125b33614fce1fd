"""Text: its tokens, the grammar that it follows, and what repeats in it."""
