"""Measurements: what a layer sees on real text, and what things cost."""
