"""Gestalt and saccades: how a budget is shared between them, the picture at full resolution, and compression."""
