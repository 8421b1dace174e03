"""The three primitives: forward, its derivative, and the transpose of that."""
