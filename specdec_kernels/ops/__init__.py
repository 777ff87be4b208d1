"""The contract: one file an op, with its schema, fake, validation, docstring and way to a backend."""
