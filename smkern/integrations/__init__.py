"""Other libraries that can use the operators. Nothing is registered on import."""
