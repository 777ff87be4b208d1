"""Models of the transformers library as `Runner`, on a ragged cache. Nothing here is imported before it is needed."""
