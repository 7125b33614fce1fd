"""Hugging Face models as forwards over N tokens with row metadata."""
