"""The contract: one file per op, with its schema, fake, validation, docstring and way to a backend."""
