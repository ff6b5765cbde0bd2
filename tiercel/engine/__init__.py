"""The loop that admits, schedules, launches, collects and emits, and what loads a model for it.

Start with `engine.py`. A step is planned and launched while the one before it runs on the device.
"""
