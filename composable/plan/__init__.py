"""Thought: layouts, phases, order and buckets as ints, strings and enums; knows neither torch nor a module."""
