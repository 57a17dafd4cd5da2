"""The client. The synchronous one is generated from it."""
