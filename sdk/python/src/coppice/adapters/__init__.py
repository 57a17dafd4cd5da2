"""Coppice as the sandbox of frameworks for agents. Each module needs its framework: see docs/ADAPTERS.md."""
