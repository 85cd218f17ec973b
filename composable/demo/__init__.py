"""The main job: train a small language model on real text; uses the front door of the package and nothing behind it."""
