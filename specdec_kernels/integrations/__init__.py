"""What knows other libraries: a folder for each. Importing this one imports none of them."""
