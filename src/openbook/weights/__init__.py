"""Weights in and out: what each container calls a tensor, how it arranges it, and whether it fits.

`load.load_decoder` builds a model from files, `save.save_hf` and `save_gguf.save_gguf` write one,
`verify.verify` compares a file with the ledger and needs no torch for it.
"""
