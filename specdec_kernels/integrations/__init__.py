"""Integrations with other libraries, a folder or module each. Importing this package imports none of them."""
