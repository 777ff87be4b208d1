"""The specification as readable PyTorch: every op, on any device, in float32 or (given float64 logits) in float64.

Nothing here is fast, and rows as wide as the vocabulary are written freely. The arithmetic that fixes *which* token
comes out is that of the contract: rows in tiles of 1024 ids, tile partials combined in index order, draws that walk
tile masses and then ids.
"""
