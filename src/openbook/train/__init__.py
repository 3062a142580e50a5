"""Training by teacher forcing: text to packed tokens, the loop, checkpoints; see docs/train.md.

Data and its order need no torch; nothing is imported here.
"""
