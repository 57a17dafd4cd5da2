"""A client. The asynchronous one is written by hand, and the synchronous one is generated from it."""
