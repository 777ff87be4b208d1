"""The specification as readable PyTorch: every op, on any device, in float32 or (given float64 logits) in float64.

Nothing here is fast, and rows as wide as the vocabulary are written freely. The arithmetic that fixes *which* token
comes out is that of the contract: rows in tiles of 1024 ids, tile partials added as balanced trees (the order stands in
csrc/common/tile_sums.h), draws that go down those sums and then walk ids.
"""
