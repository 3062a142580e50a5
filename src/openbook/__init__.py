"""Openbook: decoder-only Transformers whose books are open."""

__version__ = "0.1.0"
